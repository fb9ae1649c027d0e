"""A run from its start to its end: where it starts, its sizes, and the loop."""
