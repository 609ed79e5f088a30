"""The parts of `benchmarks.elastic`: hosts that train together (`hosts`), the paper's figures (`growing`), a busy
machine (`calm`), and random faults of a whole `hpcstage run` (`chaos`)."""
