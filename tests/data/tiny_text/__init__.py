"""A TFDS dataset of five documents, in a package of its own as TFDS wants it."""
