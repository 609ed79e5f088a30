"""Turns the record of a run into lines for a terminal."""
