"""`python -m tokenformer_jax.plan`."""

from absl import flags

from tokenformer_jax import cli
from tokenformer_jax.plan import command

command.define_flags()
flags.adopt_module_key_flags(command)  # which --help lists, below this text:
__doc__ = command.__doc__
cli.run(command.main)
