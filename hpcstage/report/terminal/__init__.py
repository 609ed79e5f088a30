"""The report of a run as lines for a terminal."""
