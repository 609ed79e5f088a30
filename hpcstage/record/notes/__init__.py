"""Composes notes: what a user should know about a run and do about it. Pure."""
