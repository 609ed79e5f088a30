"""Redirects the file functions of every loaded library: the C extension, which is built into this directory."""
