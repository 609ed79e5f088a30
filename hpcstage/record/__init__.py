"""Composes the record, the one machine-readable result of a run, from what the wrapper and the nodes report."""
