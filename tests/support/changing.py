"""The defaults with changes: what a config becomes, or the sentence that refuses it."""

import pytest

from tokenformer_jax import config as config_lib
from tokenformer_jax.errors import UserError


def resolved(**changes) -> config_lib.Config:
  """The defaults with changes, two underscores for a dot, resolved."""
  values = config_lib.defaults()
  with values.ignore_type():
    for path, value in changes.items():
      *groups, last = path.split('__')
      group = values
      for name in groups:
        group = group[name]
      group[last] = value
  return config_lib.resolve(values)


def refusal(**changes) -> str:
  with pytest.raises(UserError) as error:
    resolved(**changes)
  return str(error.value)
