"""`hpcstage config`: what holds, and why."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from hpcstage.cli.command import CommandGroup
from hpcstage.cli.options import all_options

if TYPE_CHECKING:
    from hpcstage.config import Config


@click.group(
    "config",
    cls=CommandGroup,
    invoke_without_command=True,
    short_help="Show every setting, its value and where it comes from.",
)
@click.pass_context
def config(context: click.Context) -> None:
    """Settings: the first source in this list that sets a value wins.

    Option, HPCSTAGE_* variable, --config FILE, ./hpcstage.yaml, user's file, site's file, default.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@config.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print a list of {key, value, source}.")
@all_options
def show(as_json: bool, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Print every setting, its value and where it comes from; takes the options of `run`, to try them."""
    from hpcstage import inherited
    from hpcstage.config import load

    found = load(given, os.environ, inherited.directory())
    for warning in found.warnings:
        click.echo(f"hpcstage: warning: {warning}", err=True)
    click.echo(json.dumps(found.rows(), indent=2) if as_json else _table(found))
    return 0


def _table(found: Config) -> str:
    from hpcstage.report.canvas import WIDE, Canvas, grid

    rows = ((str(row["key"]), _shown(row["value"]), str(row["source"])) for row in found.rows())
    return "\n".join(Canvas(WIDE).lines(grid("lll", rows, ("key", "value", "source"), gap=2)))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


@config.command("default")
def default() -> int:
    """Print a commented file with every setting, to start one's own from."""
    from hpcstage.config.commented import commented_default

    click.echo(commented_default(), nl=False)
    return 0
