"""Every bound of a key is in force, and the sentence names the key and the bound."""

import dataclasses
from collections.abc import Iterator

import annotated_types
import pytest

from tokenformer_jax.config import Config
from tokenformer_jax.config.section import field_types, kinds_of, named_sections
from tokenformer_jax.errors import UserError

# By the type of a bound: the value beside it that it refuses, as a distance, and the words for it.
BOUNDS = {
  annotated_types.Gt: (0, 'greater than'),
  annotated_types.Ge: (-1, 'greater than or equal to'),
  annotated_types.Lt: (0, 'less than'),
  annotated_types.Le: (1, 'less than or equal to'),
}


def sections(cls: type) -> Iterator[type]:
  """Yield the sections that a config can have."""
  cls = getattr(cls, 'written_as', cls)
  yield cls
  for field in field_types(cls).values():
    if named := named_sections(field):
      yield from sections(named.of)
    for kind in (kinds_of(field) or {}).values():
      yield from sections(kind)
    if isinstance(field.annotation, type) and dataclasses.is_dataclass(field.annotation):
      yield from sections(field.annotation)


CASES = [
  (cls, name, bound)
  for cls in dict.fromkeys(sections(Config))
  for name, field in field_types(cls).items()
  for bound in field.metadata
  if type(bound) in BOUNDS
]


@pytest.mark.parametrize(('cls', 'name', 'bound'), CASES)
def test_a_value_beyond_its_bound_is_refused(cls, name, bound):
  distance, words = BOUNDS[type(bound)]
  ((_, limit),) = dataclasses.asdict(bound).items()
  is_float = isinstance(getattr(cls(), name), float)
  value = float(limit + distance) if is_float else limit + distance
  with pytest.raises(UserError) as error:
    cls(**{name: value})
  assert str(error.value) == f'{cls.__name__}.{name} is {value!r}; it must be {words} {limit:g}'
