"""Weights between this library and released ones: the files of PyTorch, and both formats."""
