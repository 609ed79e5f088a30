"""Says what was wrong with a run, and what a user should know about it and do. Pure."""
