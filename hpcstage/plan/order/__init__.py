"""Makes the order in which files are read: from lists, samplers and traces. Pure, but for reading and writing files."""
