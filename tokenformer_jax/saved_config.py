"""What of the config of a saved run counts on this machine: a run may come from a stranger.

Most keys say what is computed, and can only make a bad model. Of the paths, these stay, because
only data is read from them or written to them:

  data.source, data.tokenizer   text, images, a tokenizer.json
  data.cache_dir                token stores, in folders named by a hash of what they hold
  init_from                     a checkpoint, whose own config passes through here

`train.compilation_cache` does not stay. JAX loads finished programs from that directory and runs
them, so whoever chooses the directory chooses what this process does. The user names it, by a flag
(--config.train.compilation_cache=DIR), a config file, or JAX_COMPILATION_CACHE_DIR.
"""

import dataclasses

from tokenformer_jax.config import Config


def without_programs(saved: Config) -> Config:
  """Return the config of a saved run without the directory of compiled programs."""
  return dataclasses.replace(saved, train=dataclasses.replace(saved.train, compilation_cache=''))
