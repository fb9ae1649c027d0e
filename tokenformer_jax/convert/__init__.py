"""Convert weights to and from the released code: PyTorch files and TPU checkpoints."""
