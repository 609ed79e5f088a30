"""Follows PyTorch's loaders: announces epochs, marks samples, measures waits."""
