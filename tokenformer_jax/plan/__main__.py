"""Run `python -m tokenformer_jax.plan`."""

from tokenformer_jax.plan import command

command.run()
