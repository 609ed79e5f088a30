"""The daemon as a process: its helpers, its socket, its page, and what it asks the kernel."""
