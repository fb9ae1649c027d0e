"""A run on disk: checkpoints, config, metrics, and the claim that allows one writer."""
