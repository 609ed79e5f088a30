"""Messages and buffers between exchanges. Knows nothing of files."""
