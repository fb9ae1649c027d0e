"""Cluttered digits as a TFDS dataset. TFDS requires a package of its own."""
