"""The wrapper: node and run directories, daemon and command, signals, exit codes, cleaning up."""
