"""The program that moves staged files between nodes by MPI; one exchange runs on each node."""
