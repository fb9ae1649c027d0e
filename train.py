"""Train a model: `tokenformer train` from a checkout, whether the package is installed or not."""

from tokenformer_jax.cli import train

if __name__ == '__main__':
  train.run()
