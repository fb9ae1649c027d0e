"""Families of models in the hub's layout: maps of their keys and tensors, in both directions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tokenformer_jax.config import ModelConfig, RotaryConfig
from tokenformer_jax.config.mixers import (
  LinearScalingConfig,
  Llama3ScalingConfig,
  RotaryScalingConfig,
  YarnScalingConfig,
)
from tokenformer_jax.convert.hub_keys import Keys

ACTIVATIONS = {
  **dict.fromkeys(('gelu', 'gelu_python'), 'gelu'),
  **dict.fromkeys(('gelu_new', 'gelu_fast', 'gelu_accurate'), 'gelu_tanh'),
  **dict.fromkeys(('gelu_pytorch_tanh', 'gelu_python_tanh'), 'gelu_tanh'),
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
}
ACTIVATION_NAMES = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu': 'relu', 'silu': 'silu'}


class Rule(NamedTuple):
  """A tensor in the hub's layout and the places of its numbers among our arrays.

  Attributes:
    name: of a tensor, with {layer} and {expert} where there are several.
    paths: those in a layer, or in the model without {layer}. Several share one tensor.
    how: `same`; `transposed`; `row`: as a matrix of one row; `columns`: several side by side; or
      `heads`: transposed, and of each head in turn.
  """

  name: str
  paths: tuple[str, ...]
  how: str = 'same'


class Family(NamedTuple):
  """A kind of models in the hub's layout.

  `defaults` are the values of absent keys in `transformers`, where they are not those of Llama and
  not those of a key that is null.
  """

  kind: str  # model_type
  architecture: str
  to_model: Callable[[Keys], ModelConfig]
  to_keys: Callable[[ModelConfig], dict[str, Any]]
  rules: tuple[Rule, ...]
  prefix: str  # of all names but those of the head, absent in a file of the model without head
  stored: tuple[str, ...] = ()  # ends of the names of tensors that hold no parameters
  defaults: Mapping[str, Any] = {}


def linear(theirs: str, ours: str, how: str = 'transposed') -> Iterator[Rule]:
  """Yield the rules of a matrix, stored with outputs first, and of its bias."""
  yield Rule(f'{theirs}.weight', (f'{ours}/kernel',), how)
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


def norm(theirs: str, ours: str) -> Iterator[Rule]:
  """Yield the rules of a norm."""
  yield Rule(f'{theirs}.weight', (f'{ours}/scale',))
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


def rotary(keys: Keys, *, fraction: float = 1.0, base: float = 10000.0) -> RotaryConfig:
  """Return the rotation, whose keys are in a table of their own or, in older files, beside it.

  `fraction` and `base` are for files that do not have them in the table.
  """
  newer = keys.get('rope_parameters')
  # In a file with both tables, transformers reads the older one.
  inner = keys.table('rope_scaling' if keys.get('rope_scaling') or not newer else 'rope_parameters')
  return RotaryConfig(
    fraction=inner.number('partial_rotary_factor', fraction),
    base=inner.number('rope_theta', keys.number('rope_theta', base)),
    scaling=_scaling(inner),
  )


def _scaling(keys: Keys) -> RotaryScalingConfig:
  """Return the scaling of a rotation."""
  kind = keys.get('rope_type', keys.get('type', 'default'))
  length = keys.whole('original_max_position_embeddings') if kind in ('llama3', 'yarn') else 0
  match kind:
    case 'default':
      return RotaryScalingConfig()
    case 'linear':
      return LinearScalingConfig(keys.number('factor'))
    case 'llama3':
      low, high = keys.number('low_freq_factor'), keys.number('high_freq_factor')
      return Llama3ScalingConfig(keys.number('factor'), low, high, length)
    case 'yarn':
      for name, allowed in (('truncate', (True,)), ('mscale', ()), ('mscale_all_dim', ())):
        keys.only(name, *allowed)
      fast, slow = keys.number('beta_fast', 32.0), keys.number('beta_slow', 1.0)
      gain = keys.number('attention_factor') if keys.get('attention_factor') else 0.0
      return YarnScalingConfig(keys.number('factor'), fast, slow, length, gain)
  named = 'rope_type' if keys.get('rope_type') else 'type'
  raise keys.refusal(named, 'default, linear, llama3 or yarn')


def rotary_keys(rotary: RotaryConfig) -> dict[str, Any]:
  """Return the keys of a rotation, in the newer and the older form."""
  scaling = rotary.scaling
  values: dict[str, Any] = {'rope_type': 'default' if scaling.kind == 'none' else scaling.kind}
  if isinstance(scaling, LinearScalingConfig):
    values['factor'] = scaling.factor
  match scaling:
    case Llama3ScalingConfig():
      values |= {
        'low_freq_factor': scaling.low_frequency,
        'high_freq_factor': scaling.high_frequency,
        'original_max_position_embeddings': scaling.length,
      }
    case YarnScalingConfig():
      values |= {
        'beta_fast': scaling.fast,
        'beta_slow': scaling.slow,
        'original_max_position_embeddings': scaling.length,
      } | ({'attention_factor': scaling.gain} if scaling.gain else {})
  return {
    'rope_theta': rotary.base,
    'rope_scaling': values if scaling.kind != 'none' else None,
    'rope_parameters': {'rope_theta': rotary.base, **values},
  }


def check_heads(keys: Keys, name: str, width: int, heads: int) -> None:
  """Check that heads fill the width."""
  if width % heads:
    raise keys.refusal(name, f'a divisor of the width {width}')
