"""`python -m tokenformer_jax.grow`."""

from tokenformer_jax.grow import command

command.run()
