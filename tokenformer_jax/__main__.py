"""`python -m tokenformer_jax`: the command `tokenformer`, where it is not installed."""

from tokenformer_jax.cli import verbs

verbs.main()
