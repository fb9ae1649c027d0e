"""Run `python -m tokenformer_jax.laws`."""

from tokenformer_jax.laws import command

command.run()
