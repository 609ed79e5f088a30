"""Keeps checkpoints of a job on several nodes: one number, one restore and one drain for the shares of all nodes."""
