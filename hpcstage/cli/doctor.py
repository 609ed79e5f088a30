"""`hpcstage doctor`: the options of `run`, then what the checks found."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from hpcstage.cli.command import RunCommand
from hpcstage.cli.options import dataset_options, run_options

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command(
    "doctor",
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Check whether a run would stage here, and say what to do where it would not.",
)
@dataset_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def doctor(command: tuple[str, ...], as_json: bool, quiet: bool, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Check on this host what `hpcstage run` with the same options needs. Starts no COMMAND, but its Python.

    \b
    hpcstage doctor
    hpcstage doctor --data /lustre/imagenet/train -- python train.py

    One line for each check: `ok`, `warning` (it would work, but not as well as it could) or `error` (it would not
    work), and what to do. With --quiet only warnings and errors. A file system that hangs is named after 5 s.

    Exit code 0: a run would work; 1: it would not stage, or not do what its options say; 2: bad usage.
    """
    from hpcstage import inherited
    from hpcstage.config import load
    from hpcstage.doctor import checks
    from hpcstage.wrapper import passthrough

    if "HPCSTAGE_NODE_DIR" in os.environ and not passthrough.passes_through(os.environ):
        passthrough.forget(os.environ)
    findings = []
    for finding in checks.examine(command, load(given, os.environ, inherited.directory())):
        findings.append(finding)
        if not as_json and not (quiet and finding.level == "ok"):
            level = click.style(f"{finding.level:8}", _COLOURS[finding.level])
            encoding = sys.stdout.encoding or "utf-8"  # paths may hold what it has not
            click.echo(f"{level} {finding.line}".encode(encoding, "backslashreplace").decode(encoding))
    works = all(finding.level != "error" for finding in findings)
    if as_json:
        found = {"host": os.uname().nodename, "works": works, "findings": [vars(finding) for finding in findings]}
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo("a run would work here" if works else "a run would not work here: see the errors above")
    return 0 if works else 1
