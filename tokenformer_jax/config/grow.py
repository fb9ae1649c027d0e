"""The group `grow`: how a larger model is made of a trained one."""

import dataclasses

from tokenformer_jax.config.fields import key


@dataclasses.dataclass(frozen=True)
class GrowConfig:
  """How `init_from`, or the grow command, makes a larger model of a trained one: see grow/."""

  method: str = key(
    'zero_keys',
    'the last three widen a Transformer, the others add tokens',
    choices=(
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
    "keep or resize the reference counts. '': as it is exact for the method",
    choices=('', 'keep', 'resize'),
  )
  new_values: str = key('init', 'the values of new tokens', choices=('init', 'zero'))
  moments: str = key('pad', "the optimizer's moments", choices=('pad', 'drop'))
  step: str = key(
    'keep',
    'the number of steps, which the data and the schedule go by',
    choices=('keep', 'restart'),
  )
  noise: float = key(
    0.0,
    "added to copies, as a fraction of each array's root mean square. 0: exact",
    least=0,
  )
  seed: int = key(0, 'of what growth draws', least=0)
