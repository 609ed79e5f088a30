"""A watched node-local directory and its exact drain to a directory on the shared file system."""
