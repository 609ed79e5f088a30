"""The program `hpcstage run`: directories, command, signals, exit code, record, cleaning up."""
