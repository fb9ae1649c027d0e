"""Handwritten digits as a TFDS dataset, in a package of its own as TFDS wants it."""
