"""Knows where the page is that explains the report: `docs/report.md`, of which a wheel has a copy in this package."""

from __future__ import annotations

from pathlib import Path

PAGE = "report.md"
_HERE = Path(__file__).parent
_PLACES = (_HERE / PAGE, _HERE.parent.parent / "docs" / PAGE)


def explained() -> str:
    """Returns the line that names the page, by a path that exists here."""
    path = next((path for path in _PLACES if path.is_file()), None)
    where = f"docs/{PAGE} of hpcstage's source" if path is None else path
    return f"Explained in {where}"
