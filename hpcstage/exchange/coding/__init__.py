"""Serves the checkpoint agents: their messages, the erasure code of a group of nodes, files of other nodes."""
