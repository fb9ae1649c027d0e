"""Families of models in the hub's layout: how config.json is read, and the names of tensors.

A family is a function that makes a model of the keys of a config.json, and rules of its tensors.
No function writes the keys of a family: `families.match` lists the keys that all families have for
a model, and takes those that the function reads.

A new family is such a function, a row in `llama_families.py` or `gpt_families.py`, and a tiny
config in `tests/support/hub_folders.py`, by which the tests of all families run.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from tokenformer_jax.config import LayerConfig, LMConfig, RotaryConfig, pattern
from tokenformer_jax.config.mixers import (
  LinearScalingConfig,
  Llama3ScalingConfig,
  RotaryScalingConfig,
  YarnScalingConfig,
)
from tokenformer_jax.config.model import Layers
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.tensor_layout import Rule

ACTIVATIONS = {
  **dict.fromkeys(('gelu', 'gelu_python'), 'gelu'),
  **dict.fromkeys(('gelu_new', 'gelu_fast', 'gelu_accurate'), 'gelu_tanh'),
  **dict.fromkeys(('gelu_pytorch_tanh', 'gelu_python_tanh'), 'gelu_tanh'),
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
}
_LENGTH = 'original_max_position_embeddings'  # an absent one is max_position_embeddings
SCALINGS = {  # by the hub's name: our class, and the key of each of its fields
  'linear': (LinearScalingConfig, {'factor': 'factor'}),
  'llama3': (
    Llama3ScalingConfig,
    {
      'factor': 'factor',
      'low_frequency': 'low_freq_factor',
      'high_frequency': 'high_freq_factor',
      'length': _LENGTH,
    },
  ),
  'yarn': (
    YarnScalingConfig,
    {
      'factor': 'factor',
      'fast': 'beta_fast',
      'slow': 'beta_slow',
      'length': _LENGTH,
      'gain': 'attention_factor',
    },
  ),
}
_SCALING_DEFAULTS = {'beta_fast': 32.0, 'beta_slow': 1.0}


class Family(NamedTuple):
  """A kind of models in the hub's layout.

  `defaults` are the values of absent keys in `transformers`, where they are not those of Llama and
  not those of a key that is null.
  """

  kind: str  # model_type
  architecture: str
  to_model: Callable[[Keys], LMConfig]
  rules: tuple[Rule, ...]
  defaults: Mapping[str, Any] = {}

  @property
  def prefix(self) -> str:
    """The start of all names but those of the head, absent in a file of the model without head."""
    return f'{self.rules[0].name.partition(".")[0]}.'


def linear(theirs: str, ours: str, how: str = 'transposed') -> Iterator[Rule]:
  """Yield the rules of a matrix, stored with outputs first, and of its bias."""
  yield Rule(f'{theirs}.weight', (f'{ours}/kernel',), how)
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


def norm(theirs: str, ours: str) -> Iterator[Rule]:
  """Yield the rules of a norm."""
  yield Rule(f'{theirs}.weight', (f'{ours}/scale',))
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


def check_heads(keys: Keys, name: str, width: int, heads: int) -> None:
  """Check that heads fill the width."""
  if width % heads:
    raise keys.refusal(name, f'a divisor of the width {width}')


def rotary(
  keys: Keys,
  *,
  fraction: float = 0.0,
  base: float = 10000.0,
  scalings: Collection[str] = tuple(SCALINGS),
) -> RotaryConfig:
  """Return the rotation, whose keys are in a table or, in older files, outside of it.

  `fraction` and `base` are for files that do not have them in the table. Families whose heads
  rotate in part have a `fraction`, and `scalings` are those of the family.
  """
  newer = keys.get('rope_parameters')
  # In a file with both tables, transformers reads the older one.
  name = 'rope_scaling' if keys.get('rope_scaling') or not newer else 'rope_parameters'
  outside = keys.get(_LENGTH)  # wins in transformers
  inner = keys.table(name, {_LENGTH: outside or keys.whole('max_position_embeddings', 2048)})
  if outside and inner.get('rope_type', inner.get('type')) in (*SCALINGS,):
    inner.only(_LENGTH, outside)
  if not fraction:
    for table in (keys, inner):
      table.only('partial_rotary_factor', 1)
  return RotaryConfig(
    fraction=inner.number('partial_rotary_factor', fraction) if fraction else 1.0,
    base=inner.number('rope_theta', keys.number('rope_theta', base)),
    scaling=_scaling(inner, scalings),
  )


def rotary_by_kind(keys: Keys) -> list[RotaryConfig]:
  """Return the rotation of layers without a window, and that of the others: Gemma 3.

  Each has a table in `rope_parameters`. In older files `rope_scaling` is of the first kind alone,
  and wins.
  """
  tables, made = keys.table('rope_parameters'), []
  defaults = {_LENGTH: keys.whole('max_position_embeddings')}
  for kind, name, base in (
    ('full_attention', 'rope_theta', 1e6),
    ('sliding_attention', 'rope_local_base_freq', 1e4),
  ):
    table = tables.table(kind, defaults)
    base = table.number('rope_theta', keys.number(name, base))
    if not made and keys.get('rope_scaling'):
      table = keys.table('rope_scaling', defaults)
      base = table.number('rope_theta', base)
    table.only('partial_rotary_factor', 1)
    if not table.get('rope_type'):
      table.only('type', 'default')  # an older name, which transformers does not read here
    made.append(RotaryConfig(1.0, base, scaling=_scaling(table, tuple(SCALINGS))))
  return made


def check_rotated(keys: Keys, name: str, head_width: int, fraction: float) -> None:
  """Check that an even number of the entries of a head is rotated."""
  rotated = int(head_width * fraction)
  if fraction > 1 or rotated < 2 or rotated % 2:
    raise keys.refusal(name, f'a fraction of {head_width} entries that gives an even number')


def _scaling(keys: Keys, known: Collection[str]) -> RotaryScalingConfig:
  """Return the scaling of a rotation."""
  kind = keys.get('rope_type', keys.get('type', 'default'))
  if kind == 'default':
    return RotaryScalingConfig()
  if kind not in known:
    named = 'rope_type' if keys.get('rope_type') else 'type'
    raise keys.refusal(named, ' or '.join(('default', *known)))
  if kind == 'yarn':
    for name, allowed in (('truncate', (True,)), ('mscale', ()), ('mscale_all_dim', ())):
      keys.only(name, *allowed)
  made, names = SCALINGS[kind]
  values: dict[str, Any] = {
    field: keys.whole(name) if field == 'length' else keys.number(name, _SCALING_DEFAULTS.get(name))
    for field, name in names.items()
    if field != 'gain' or keys.get(name) is not None
  }
  return made(**values)


def with_kinds(model: LMConfig, names: list[str], variants: dict[str, LayerConfig]) -> LMConfig:
  """Return the model with the layers of these names in order: `layer`, or one of the variants."""
  if len(set(names)) == 1:
    return dataclasses.replace(model, layer=variants.get(names[0], model.layer))
  variants = {name: layer for name, layer in variants.items() if name in names}
  repeats = pattern.as_text(_repeats(names))
  return dataclasses.replace(model, pattern=repeats, variants=Layers(variants))


def _repeats(names: list[str]) -> list[pattern.Repeat]:
  """Return the shortest row of layers that repeats, each repeat of which is one loop, and the rest.

  Without such a row, runs of equal layers are loops.
  """
  depth = len(names)
  whole, rest = [], names
  for size in range(2, depth // 2 + 1):
    count = depth // size
    if names[: size * count] == names[:size] * count:
      whole, rest = [pattern.Repeat(tuple(names[:size]), count)], names[size * count :]
      break
  return [*whole, *(pattern.Repeat((name,), len(list(run))) for name, run in groupby(rest))]
