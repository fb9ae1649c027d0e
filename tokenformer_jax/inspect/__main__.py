"""`python -m tokenformer_jax.inspect`; the code is in `inspection/`."""

from tokenformer_jax.inspection import command

# This folder has no __init__.py. Python puts the folder of a file that is run by its path first in
# its module search, so a package `inspect` here would hide the standard library's.

command.run()
