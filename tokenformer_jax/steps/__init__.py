"""The compiled training step, the optimizer, and the compiler options."""
