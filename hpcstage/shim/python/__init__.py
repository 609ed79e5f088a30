"""Attaches the shim to a Python process, and redirects calls by patches of Python where the extension cannot."""
