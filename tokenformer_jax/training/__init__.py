"""Train a run: its starting state, its sizes, and the loop."""
