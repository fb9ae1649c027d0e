"""What a checkpoint says of itself: its step, config, lineage, checksums and tokenizer."""

import dataclasses
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax import migrate, saved_config


@dataclasses.dataclass(frozen=True)
class Ancestor:
  """What a model was made of, other than by training: one entry of a lineage."""

  action: str  # grow, shrink, merge or remove
  source: str  # its work directory
  step: int  # of the source
  model: config_lib.ModelConfig  # the source's
  grow: config_lib.GrowConfig  # how
  updates: int  # the new model's count of optimizer updates at birth
  # After merge, and in extracted tokens: the runs that the added tokens came from, one a line.
  tokens_of: str = ''


Lineage = tuple[Ancestor, ...]  # the oldest first


@dataclasses.dataclass(frozen=True)
class Seen:
  """What a run has seen of its training data."""

  samples: int  # of the order that it is in (data/order.py)
  digest: str = ''  # of the data; '' in checkpoints that do not say


@dataclasses.dataclass(frozen=True)
class Meta:
  """What a checkpoint says of itself."""

  step: int
  updates: int  # made by the optimizer: `step` less those that were skipped
  config: config_lib.Config  # of the run that wrote it, with every size filled in
  lineage: Lineage
  # `model`; `params`, a model whose training has not begun, so that the rest of its state is zero;
  # or `added_tokens` if it holds nothing but those of the last growth.
  contents: str
  checksums: dict[str, int]  # by path in the state
  tokenizer: dict[str, Any]
  seen: Seen = Seen(0)
  # The paths that arrays have in the files, by path in the state, where an earlier format differs.
  stored_paths: dict[str, str] = dataclasses.field(default_factory=dict)


def from_json(
  stored: dict[str, Any],
  tokenizer: dict[str, Any],
  where: str,
  changes: migrate.Changes = migrate.CHANGES,
) -> Meta:
  """Return what a checkpoint of any format says of itself.

  Args:
    stored: its `meta`.
    tokenizer: its `tokenizer`.
    where: how an error names the checkpoint.
    changes: of the formats since the first.

  Raises:
    UserError: a later version of this package wrote it.
  """
  migrate.check_format(stored['format'], where, changes)
  meta = migrate.meta(stored, changes)
  paths = {migrate.array_path(p, stored['format'], changes): p for p in stored['checksums']}
  config = config_lib.from_dict(config_lib.Config, meta['config'])
  return Meta(
    step=meta['step'],
    updates=meta['updates'],
    config=saved_config.without_programs(config),
    lineage=tuple(config_lib.from_dict(Ancestor, entry) for entry in meta['lineage']),
    contents=meta['contents'],
    checksums=meta['checksums'],
    tokenizer=tokenizer,
    seen=config_lib.from_dict(Seen, meta['seen']),
    stored_paths={path: old for path, old in paths.items() if path != old},
  )
