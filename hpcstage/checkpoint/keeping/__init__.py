"""Keeps what a program completes in a local directory: as generations beside it, and as plain files in DIR."""
