"""Finds the files that a run reads: arguments, scan, manifest."""
