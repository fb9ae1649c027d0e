"""A run on disk: checkpoints, config, metrics, and the lease that allows one writer."""
