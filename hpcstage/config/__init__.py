"""Collects settings in one typed tree: CLI > environment > files > site > default; every value remembers where it came
from.

`model` declares the settings, `load` reads files and collects them, `commented` writes the commented default.
"""

from __future__ import annotations

from hpcstage.config.load import load
from hpcstage.config.model import BY_KEY, SETTINGS, Config, Setting

__all__ = ["BY_KEY", "SETTINGS", "Config", "Setting", "load"]
