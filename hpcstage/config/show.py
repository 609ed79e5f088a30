"""Formats the table of `hpcstage config show`. Owns widths, no values."""

from __future__ import annotations

import json

from hpcstage.config.model import Config


def as_text(config: Config) -> str:
    """Returns a JSON list of {key, value, source}."""
    return json.dumps(config.rows(), indent=2)


def as_table(config: Config) -> str:
    """Returns key, value and source, in columns."""
    rows = [("key", "value", "source"), *((str(r["key"]), _shown(r["value"]), str(r["source"])) for r in config.rows())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip() for key, value, source in rows)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
