"""The defaults with changes: what a config becomes, or the sentence that refuses it."""

import pytest

from tokenformer_jax import config as config_lib
from tokenformer_jax.errors import UserError


def resolved(base: config_lib.Config | None = None, **changes) -> config_lib.Config:
  """The defaults, or another config, with changes, two underscores for a dot, resolved."""
  dotted = {path.replace('__', '.'): value for path, value in changes.items()}
  return config_lib.resolve(config_lib.from_dotted(dotted), base=base)


def refusal(base: config_lib.Config | None = None, **changes) -> str:
  with pytest.raises(UserError) as error:
    resolved(base, **changes)
  return str(error.value)
