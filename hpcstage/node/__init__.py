"""One node of a run: its directory, its shared page, its environment, the start and the end of its daemon."""
