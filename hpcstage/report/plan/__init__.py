"""A plan for people and for programs."""
