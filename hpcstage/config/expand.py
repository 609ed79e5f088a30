"""Replaces `$VAR`, `${VAR}` and a leading `~` in paths that come from files and variables. Owns no settings and no
file."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Returns the path with its variables replaced; `$$` is a dollar sign.

    Raises ValueError for a variable that is not set or empty: a path with a hole in it would name another place.
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        found = env.get(name)
        if not found:
            raise ValueError(f"${name} is not set")
        return found

    if text == "~" or text.startswith("~/"):
        home = env.get("HOME")
        if not home:
            raise ValueError("~ needs $HOME, which is not set")
        return home + _VARIABLE.sub(value, text[1:])
    return _VARIABLE.sub(value, text)
