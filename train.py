"""Train a model: `tokenformer train` from a checkout, whether the package is installed or not."""

from tokenformer_jax import train_command

if __name__ == '__main__':
  train_command.run()
