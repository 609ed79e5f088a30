"""Codes checkpoints so that lost nodes can be restored: matrices, kernels, stripes over nodes. Pure."""
