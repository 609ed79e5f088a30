"""Brings what a program completed in a node-local directory to a directory of the shared file system, exactly."""
