"""The parts of `benchmarks.elastic`: hosts that train together (`hosts`), the paper's figures (`growing`), and a busy
machine (`calm`)."""
