"""Computes the figures of the record from the parts: totals, times, contention. Pure."""
