"""The group `grow`: how to make a larger model from a trained one."""

import dataclasses

from tokenformer_jax.config.fields import key


@dataclasses.dataclass(frozen=True)
class GrowConfig:
  """How `init_from` or the grow command makes a larger model from a trained one: see grow/."""

  method: str = key(
    'group',
    'group adds tokens with a norm of their own, the next three add tokens to the last group, and '
    'the others widen a Transformer',
    choices=(
      'group',
      'zero_keys',
      'duplicate',
      'random',
      'net2net',
      'net2net_fill',
      'hypercloning',
    ),
  )
  scale: str = key(
    '',
    "keep or resize the reference counts. '': whichever is exact for the method",
    choices=('', 'keep', 'resize'),
  )
  new_keys: str = key(
    'init',
    'the keys of new tokens, for group and random: drawn as at the start, drawn with the root mean '
    "square of each layer's trained keys, or copied from them with noise",
    choices=('init', 'trained', 'copies'),
  )
  new_values: str = key(
    '',
    "the values of new tokens. '': zero for group, init for the others",
    choices=('', 'init', 'zero'),
  )
  moments: str = key('pad', "the optimizer's moments", choices=('pad', 'drop'))
  step: str = key(
    'keep',
    'the step number, which sets the position in the data and the schedule',
    choices=('keep', 'restart'),
  )
  noise: float = key(
    0.0,
    "added to copies, as a fraction of each array's root mean square. 0: exact",
    least=0,
  )
  seed: int = key(0, 'seed of the random draws of growth', least=0)
  rate: float = key(
    0.0,
    'factor on optim.learning_rate in the config that the command grow writes. 0: r^−¾, where r is '
    'the factor by which the parameters of the layers grow; 1: as before',
    least=0,
  )
  place: str = key(
    'copies',
    'of new layers: between the old ones as copies of the layer before that add nothing yet, or '
    'drawn between the old ones or behind them; whole_copies add what the layer before adds, which '
    'is not exact',
    choices=('copies', 'between', 'behind', 'whole_copies'),
  )
