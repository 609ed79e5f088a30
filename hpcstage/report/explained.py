"""Has the page that explains the report: `docs/report.md`, of which a wheel has a copy in this package."""

from __future__ import annotations

from pathlib import Path

from hpcstage.errors import NoResult

PAGE = "report.md"
_HERE = Path(__file__).parent
_PLACES = (_HERE / PAGE, _HERE.parent.parent / "docs" / PAGE)


def explained() -> str:
    """Returns the page. Raises NoResult where this installation lacks it."""
    for path in _PLACES:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise NoResult(f"this installation has no {PAGE}", f"it is docs/{PAGE} in hpcstage's source")
