"""The program that moves staged files between nodes by MPI: one exchange on each node."""
