"""Cluttered digits as a TFDS dataset. TFDS requires a package for each dataset."""
