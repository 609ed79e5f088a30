"""The program `hpcstage run` handles directories, the command, signals, the exit code, the record and the clean-up."""
