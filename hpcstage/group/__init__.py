"""The node group: exchanges that move staged files between nodes by MPI, and what starts them."""
