"""Writes the commented default, from which `configs/default.yaml` is made:

    python -m hpcstage.config.commented > configs/default.yaml

Every key stands there as a comment with its default, so that a copy of the file changes nothing until a line is
uncommented, and the site's values keep holding.
"""

from __future__ import annotations

import sys
import textwrap

from hpcstage.config.model import SETTINGS, Setting

_HEAD = """\
# hpcstage: every setting with its default. Copy this to ./hpcstage.yaml (for one directory),
# ~/.config/hpcstage/config.yaml (for you) or /etc/hpcstage.yaml (for a site), and uncomment what should differ.
# Precedence: option > HPCSTAGE_* variable > --config FILE > ./hpcstage.yaml > user's file > site's file > default.
# `hpcstage config show` prints what holds, and why.
# Sizes: 500MB, 800GiB. Durations: 30s, 5m, 1.5h. $VAR and ~ are replaced in paths only; $$ is a dollar sign.
schema: 1
"""


def commented_default() -> str:
    """Returns the text of configs/default.yaml."""
    return _HEAD + "".join(_entry(s) for s in SETTINGS)


def _entry(setting: Setting) -> str:
    about = [line for text in (setting.help, setting.more) for line in textwrap.wrap(text, 116)]
    how = f"option {setting.flag}, variable {setting.env}"
    lines = [f"# {line}" for line in [*about, how + (f", {setting.metavar}" if setting.metavar else "")]]
    default = "[]" if setting.repeats else setting.default
    return "\n" + "\n".join([*lines, f"#{setting.key}: {default}"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(commented_default())
