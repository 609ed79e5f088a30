"""Decides which node reads which file from the source, and which nodes keep it. Pure."""
