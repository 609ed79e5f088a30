#!/usr/bin/env python3
"""Writes docs/reference.md: commands, options, settings, variables, exit codes and the record's keys, each from the one
place that declares it. A test compares the page with what this would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hpcstage import errors  # noqa: E402
from hpcstage.cli.main import cli  # noqa: E402
from hpcstage.config.model import OTHER_VARIABLES, SETTINGS  # noqa: E402
from hpcstage.record.schema import json_schema  # noqa: E402

PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

Written by `scripts/reference.py` from the program itself.

Settings can be given as an option, as a variable, or as a key of a YAML file. The first of these that has a value wins:
option, variable, `--config FILE`, `./hpcstage.yaml`, `~/.config/hpcstage/config.yaml`, the site's file, default.
`hpcstage config show` prints what holds, and why. Sizes: `500MB`, `800GiB`. Durations: `30s`, `5m`, `1.5h`.
"""
RUN_CODES = (
    ("the command's own", "whenever the command ran; its death by a signal is passed on too"),
    ("128 + N", "signal N arrived while `--mode upfront` was still copying"),
    ("75", "an elastic training whose policy said `fail`"),
)
"""Exit codes of `run` that no class of errors has."""


def page() -> str:
    """Returns the text of the page."""
    return "\n".join([HEAD, *_commands(), *_settings(), *_variables(), *_exit_codes(), *_record()])


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    context = click.Context(cli, info_name="hpcstage")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield from _command(command, f"hpcstage {name}")
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name)
            for below in command.list_commands(inner):
                found = command.get_command(inner, below)
                assert found is not None
                yield from _command(found, f"hpcstage {name} {below}")


def _command(command: click.Command, name: str) -> Iterator[str]:
    yield f"### `{name}`\n"
    for paragraph in inspect.cleandoc(command.help or "").replace("\f", "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield "```\n" + paragraph.removeprefix("\b\n") + "\n```\n"
        else:
            yield _escaped(" ".join(paragraph.split())) + "\n"
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    own = [option for option in options if not _is_setting(option)]
    if own:
        yield from _table("option", "")
        for option in own:
            words = ", ".join(f"`{word}`" for word in (*option.opts, *option.secondary_opts))
            yield f"| {words}{_value(option)} | {_escaped(option.help or '')} |"
        yield ""
    taken = [f"`{option.opts[0]}`" for option in options if _is_setting(option)]
    if len(taken) == len(SETTINGS):
        yield "It takes all [settings](#settings).\n"
    elif taken:
        yield f"[Settings](#settings): {', '.join(taken)}.\n"


def _is_setting(option: click.Option) -> bool:
    """Whether it is declared as a setting; others may have the same name."""
    return any(one.flag in option.opts and (option.help or "").startswith(one.help) for one in SETTINGS)


def _value(option: click.Option) -> str:
    if option.is_flag or option.count:
        return ""
    return f" `{option.metavar or option.type.name.upper()}`"


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    yield from _table("option", "variable", "key", "default", "")
    for one in SETTINGS:
        value = f" `{one.metavar}`".replace("|", "\\|") if one.metavar else ""
        default = one.default if isinstance(one.default, str) else ""
        more = f" {one.more}" if one.more else ""
        yield f"| `{one.flag}`{value} | `{one.env}` | `{one.key}` | {default} | {_escaped(one.help + more)} |"
    yield ""


def _variables() -> Iterator[str]:
    yield "## Other variables\n"
    yield from _table("variable", "")
    yield from (f"| `{name}` | {_escaped(text)} |" for name, text in OTHER_VARIABLES.items() if text)
    yield ""


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes of `hpcstage run`\n"
    yield from _table("exit code", "")
    codes: dict[int, str] = {}
    for found in vars(errors).values():
        if inspect.isclass(found) and issubclass(found, errors.HpcstageError) and "exit_code" in vars(found):
            codes.setdefault(found.exit_code, " ".join(inspect.getdoc(found).split()))
    rows = [RUN_CODES[0], *((str(code), codes[code]) for code in sorted(codes) if code != 1), *RUN_CODES[1:]]
    yield from (f"| {code} | {_escaped(text)} |" for code, text in rows)
    yield "\nThose of the other commands stand with them.\n"


def _record() -> Iterator[str]:
    schema = json_schema()
    yield "## The record\n"
    yield f"`run.json` in the run directory, printed by `hpcstage report --json`. {_escaped(schema['description'])}\n"
    yield from _table("key", "type", "")
    yield from _keys(schema, "")
    yield ""


def _keys(schema: dict[str, Any], above: str) -> Iterator[str]:
    for name, found in schema.get("properties", {}).items():
        key = f"{above}{name}"
        yield f"| `{key}` | {_type(found)} | {_escaped(found.get('description', ''))} |"
        inner = _object(found)
        if inner:
            many = "[]" if "array" in str(found.get("type")) else ".*" if "additionalProperties" in found else ""
            yield from _keys(inner, f"{key}{many}.")


def _object(found: dict[str, Any]) -> dict[str, Any] | None:
    """The keys below one, whether it is an object, a list of them, or either of several forms."""
    inner = (found.get("items", {}), found.get("additionalProperties", {}))
    forms = [found, *inner, *found.get("anyOf", ()), *found.get("oneOf", ())]
    return next((form for form in forms if isinstance(form, dict) and form.get("properties")), None)


def _type(found: dict[str, Any]) -> str:
    if "enum" in found:
        return ", ".join(str(value) for value in found["enum"])
    if "const" in found:
        return str(found["const"])
    forms = found.get("anyOf") or found.get("oneOf")
    if forms:
        return " or ".join(dict.fromkeys(_type(form) for form in forms))
    named = found.get("type", "any")
    return " or ".join(named) if isinstance(named, list) else str(named)


def _table(*columns: str) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)


def _escaped(text: str) -> str:
    """Text as Markdown: bars would end a cell, and what has angle brackets would be taken for HTML."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = (part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
    return "".join(plain).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
