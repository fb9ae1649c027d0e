"""A run on disk: its checkpoints, its config, its metrics, and the lease of who writes to it."""
