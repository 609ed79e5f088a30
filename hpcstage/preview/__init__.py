"""Measures what a plan needs and the user did not say, for `hpcstage plan` and for mode auto."""
