"""What `benchmarks.truth` compares: cells of ways to read and sources, patterns of contention."""
