"""What `benchmarks.checkpoint` measures: states saved in generations and encoded, and the pipeline over many nodes."""
