#!/usr/bin/env python3
"""Writes a man page for each command into a directory: scripts/man.py share/man/man1

The pages are made of the help texts, so that they say what this version does.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpcstage import __version__
from hpcstage.cli.main import cli
from hpcstage.config.model import BY_KEY, GROUPS


def contexts(command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Returns the context of a command and of all commands below it."""
    name = "hpcstage" if parent is None else command.name
    context = click.Context(command, parent=parent, info_name=name, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from contexts(below, context)


def page(context: click.Context) -> str:
    """Returns the man page of a command."""
    command, name = context.command, context.command_path
    lines = [f'.TH "{title(context).upper()}" 1 "" "hpcstage {__version__}" "hpcstage"', ".SH NAME"]
    lines.append(f"{escape(title(context))} \\- {escape(command.get_short_help_str(limit=200).rstrip('.'))}")
    usage = " ".join(command.collect_usage_pieces(context))
    lines += [".SH SYNOPSIS", f"\\fB{escape(name)}\\fR {escape(usage)}", ".SH DESCRIPTION", *described(command.help)]
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    for group in ("", *GROUPS):
        rows = [one for one in options if group == (BY_KEY[one.name].group if one.name in BY_KEY else "")]
        lines += [f".SH {escape(group.upper() or 'OPTIONS')}"] if rows else []
        for row in (record for one in rows if (record := one.get_help_record(context))):
            lines += [".TP", f"\\fB{escape(row[0])}\\fR", escape(row[1])]
    if isinstance(command, click.Group):
        below = [f"{title(context)}-{one}(1)" for one in command.list_commands(context)]
        lines += [".SH SEE ALSO", escape(", ".join(below))]
    return "\n".join(lines) + "\n"


def described(text: str | None) -> Iterator[str]:
    """Returns the paragraphs of a help text; those that click leaves as they are keep their lines."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        kept = paragraph.startswith("\b\n")
        body = [escape(line) for line in paragraph.removeprefix("\b\n").splitlines()]
        yield from [".PP", *([".nf", *body, ".fi"] if kept else body)]


def title(context: click.Context) -> str:
    """Returns the name of a command's page."""
    return context.command_path.replace(" ", "-")


def escape(text: str) -> str:
    """Returns a text as roff reads it as text."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def main() -> int:
    """Writes all pages."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"usage: {sys.argv[0]} DIRECTORY\n")
        return 2
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for context in contexts(cli):
        (target / f"{title(context)}.1").write_text(page(context), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
