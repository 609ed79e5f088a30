"""Makes plans, for `hpcstage plan` and for runs: scan, order, and for `plan` budget and forecast."""
