"""Passes messages and buffers between exchanges. Knows nothing of files."""
