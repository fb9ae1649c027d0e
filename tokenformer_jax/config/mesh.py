"""The group `mesh`: the arrangement of the devices."""

import dataclasses

from tokenformer_jax.config.fields import key


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; one size may be -1: all remaining devices."""

  replica: int = key(1, 'copies of the model')
  fsdp: int = key(-1, 'parts of parameters by width, and of the batch')
  experts: int = key(
    1, 'parts of the experts, and of batch and width as well: these devices are also fsdp'
  )
  tokens: int = key(1, 'parts of parameter tokens, heads and vocabulary')
