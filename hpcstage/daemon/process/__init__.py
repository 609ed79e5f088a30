"""The daemon as a process: its helpers, socket, page, and what the kernel says."""
