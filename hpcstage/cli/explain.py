"""`hpcstage explain`: prints the page that explains the report. No logic."""

from __future__ import annotations

import click


@click.command("explain", short_help="Explain every word and figure of the report.")
def explain() -> int:
    """Print the page that explains every word and figure of `hpcstage report`.

    \b
    hpcstage explain | less
    """
    from hpcstage.report.explained import explained

    click.echo(explained(), nl=False)
    return 0
