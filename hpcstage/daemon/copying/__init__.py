"""Copies files with copier processes, and drops copies of files that change."""
