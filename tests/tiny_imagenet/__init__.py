"""A TFDS dataset with ImageNet's features, in a package of its own as TFDS wants it."""
