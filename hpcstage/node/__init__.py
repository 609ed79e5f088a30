"""A node of a run: its directory, its shared page, its environment, and the start and end of its daemon."""
