"""The check of arguments by annotations: what fits, and what it becomes."""

import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Count, Path
from tokenformer_jax.config.section import Bool, Float, Str
from tokenformer_jax.errors import UserError, arg


@arguments.checked
def called(
  count: Count = 1,
  rate: Annotated[Float, Field(gt=0, lt=1)] = 0.5,
  flag: Bool = False,
  where: Path = 'x',
  names: Sequence[Str] = (),
  sizes: Count | Mapping[str, Count] | None = None,
  **others: object,
):
  """Return the arguments."""
  return dict(locals())


@pytest.mark.parametrize(
  ('given', 'want'),
  [
    ({'count': np.int64(3)}, 3),
    ({'count': np.array(3)}, 3),
    ({'count': jnp.int32(3)}, 3),
    ({'rate': np.float32(0.25)}, 0.25),
    ({'rate': jnp.float32(0.25)}, 0.25),
    ({'flag': np.bool_(True)}, True),
    ({'where': pathlib.Path('a')}, pathlib.Path('a')),
    ({'names': ('a', 'b')}, ('a', 'b')),
    ({'names': np.array(['a', 'b'])}, ['a', 'b']),
    ({'sizes': None}, None),
    ({'sizes': {'a': np.int32(2)}}, {'a': 2}),
    ({'more': 'not checked'}, 'not checked'),
  ],
)
def test_a_value_that_fits_becomes_python_s(given, want):
  (name,) = given
  found = called(**given)
  found = found['others'][name] if name not in found else found[name]
  assert found == want and type(found) is type(want)


def test_defaults_are_not_checked_and_the_signature_stays():
  assert called()['names'] == () and 'sizes' in inspect.signature(called).parameters


def test_bounds_hold_inside_of_unions_and_dicts():
  with pytest.raises(UserError, match='called: sizes has a=0; it must be greater than or'):
    called(sizes={'a': 0})
  with pytest.raises(UserError, match=r'called: rate is 1; it must be less than 1'):
    called(rate=1)


def test_an_error_names_arguments_as_the_user_writes_them_and_keeps_values():
  @arguments.checked
  def find(where: Path):
    raise UserError(f'there is no {where!r}; give {arg.where}=NEW, or {arg["others"]}')

  with pytest.raises(UserError) as error:
    find('a --where b')
  assert str(error.value) == "there is no 'a --where b'; give where=NEW, or others"
  with pytest.raises(UserError) as error, arg.as_flags():
    find('a --where b')
  assert str(error.value) == "there is no 'a --where b'; give --where=NEW, or --others"
