"""Measures what a plan needs and nobody said, for `hpcstage plan` and for mode auto."""
