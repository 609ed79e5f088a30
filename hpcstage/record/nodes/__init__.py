"""Compares the nodes of a job, and describes their node group. Pure."""
