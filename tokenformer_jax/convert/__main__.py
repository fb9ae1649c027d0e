"""`python -m tokenformer_jax.convert`."""

from tokenformer_jax.convert import command

command.run()
