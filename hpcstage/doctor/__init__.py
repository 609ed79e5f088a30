"""Checks, before a run, whether it would stage."""
