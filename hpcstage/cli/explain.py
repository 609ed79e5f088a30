"""`hpcstage explain`: prints the page that explains the report, `docs/report.md`, of which a wheel has a copy."""

from __future__ import annotations

from pathlib import Path

import click

from hpcstage.errors import NoResult

PAGE = "report.md"
_PACKAGE = Path(__file__).parent.parent
_PLACES = (_PACKAGE / "report" / PAGE, _PACKAGE.parent / "docs" / PAGE)


@click.command("explain", short_help="Explain every word and figure of the report.")
def explain() -> int:
    """Print the page that explains every word and figure of `hpcstage report`.

    \b
    hpcstage explain | less
    """
    click.echo(explained(), nl=False)
    return 0


def explained() -> str:
    """Returns the page. Raises NoResult where this installation lacks it."""
    for path in _PLACES:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise NoResult(f"this installation has no {PAGE}", f"it is docs/{PAGE} in hpcstage's source")
