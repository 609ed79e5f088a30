"""In which order files are read: lists, samplers, traces. Pure."""
