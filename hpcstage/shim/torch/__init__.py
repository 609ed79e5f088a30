"""Follows PyTorch's loaders: announces epochs, measures waits."""
