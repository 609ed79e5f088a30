"""Draws the record of a run as one web page that needs nothing else."""
