"""`python -m tokenformer_jax.inspect`; the code is in `inspection/`."""

from tokenformer_jax.inspection import command

# This folder has no __init__.py: it would hide Python's own `inspect` from whoever runs a file of
# tokenformer_jax by its path, which puts that file's folder first in the search for modules.

command.run()
