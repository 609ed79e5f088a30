"""What is written: the nodes' parts, the record, the index of runs."""
