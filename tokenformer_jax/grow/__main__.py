"""`python -m tokenformer_jax.grow`."""

from tokenformer_jax import cli
from tokenformer_jax.grow import command

command.define_flags()
cli.run(command.main, positional=True)
