"""Generations of a program's state below one node-local directory: whole, or as what changed since the one before."""
