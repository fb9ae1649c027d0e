"""`python -m tokenformer_jax`: the command `tokenformer`, where it is not installed."""

from tokenformer_jax import commands

commands.main('python -m tokenformer_jax')
