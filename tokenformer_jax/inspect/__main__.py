"""`python -m tokenformer_jax.inspect`."""

from absl import flags

from tokenformer_jax import cli
from tokenformer_jax.inspect import command

# This folder has no __init__.py: it would hide Python's own `inspect` from whoever runs a file of
# tokenformer_jax by its path, which puts that file's folder first in the search for modules.

command.define_flags()
flags.adopt_module_key_flags(command)  # which --help lists, below this text:
__doc__ = command.__doc__
cli.run(command.main)
