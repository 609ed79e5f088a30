"""Checkpoints on node-local disks: generations of a program's state, and what protects them. Owns no decision."""
