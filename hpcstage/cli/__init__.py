"""One file per command; no logic."""
