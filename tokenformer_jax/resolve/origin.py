"""Find the checkpoint that a run continues from.

A model is its parameters and the meaning of its ids, so a run keeps the tokenizer or the classes of
the checkpoint that it continues from. `checks.py` checks that it may continue from it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta, new_run_id
from tokenformer_jax.storage import paths

Damaged = Mapping[int, checkpoint.DamagedError]


@dataclasses.dataclass(frozen=True)
class Origin:
  """The start of a run: its own checkpoint, another run's, or neither for a new model.

  Attributes:
    own: the metadata of the newest readable checkpoint in the work directory.
    other: the checkpoint of `config.init_from`.
    where: the name of the checkpoint in messages.
    lineage: the growths and other actions that made the run's model.
    damaged: the newer checkpoints of the run that cannot be read, by step.
    run: the id of the run: see `Meta.run`.
  """

  own: Meta | None = None
  other: checkpoint.Source | None = None
  where: str = ''
  lineage: Lineage = ()
  damaged: Damaged = dataclasses.field(default_factory=dict)
  run: str = ''

  @property
  def meta(self) -> Meta | None:
    """The metadata of either checkpoint."""
    return self.own if self.other is None else self.other.meta

  @property
  def model(self) -> ModelConfig | None:
    """The model of the checkpoint."""
    return self.meta and self.meta.config.model

  @property
  def vocabulary(self) -> dict[str, Any] | None:
    """The meaning of the ids of the checkpoint's model: see `Task.vocabulary`."""
    return self.meta and self.meta.tokenizer

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer | None:
    """The tokenizer of the checkpoint's model, or None for one on images."""
    if self.vocabulary is None or self.model is None or self.model.kind != 'lm':
      return None
    return tokenizers.from_json(self.vocabulary)

  @property
  def begins(self) -> str:
    """How the run begins, as the end of a sentence."""
    if self.meta is None:
      return 'begins with new parameters'
    return f'{"begins" if self.own is None else "goes on"} from {self.where}'


FROM_SCRATCH = Origin()


def find(config: Config, workdir: paths.Path, damaged: Damaged) -> Origin:
  """Return the newest checkpoint in the work directory, or the one of `config.init_from`.

  `damaged` are checkpoints in the work directory whose arrays cannot be read, by step. If all are
  damaged, raise a `UserError`.
  """
  if own := _newest(workdir, damaged):
    return own
  run = hosts.from_first(new_run_id)
  if not config.init_from:
    return Origin(run=run)
  other = checkpoint.open_source(config.init_from)
  lineage = grow_run.descend(other.meta, other.directory, 'grow', config.grow)
  return Origin(other=other, where=f'config.init_from={config.init_from}', lineage=lineage, run=run)


def _newest(workdir: paths.Path, damaged: Damaged) -> Origin | None:
  """Return the newest checkpoint that can be read, or None if there is no checkpoint."""
  unreadable = {}
  checkpoints = checkpoint.Checkpoints(workdir)
  for step in reversed(checkpoints.common_steps()):
    try:
      if step in damaged:
        raise damaged[step]
      meta = checkpoints.meta(step)
    except checkpoint.DamagedError as error:
      unreadable[step] = error
      continue
    checkpoint.check_is_model(meta, workdir)
    where = f'the checkpoint of step {step} in this work directory'
    return Origin(meta, where=where, lineage=meta.lineage, damaged=unreadable, run=meta.run)
  if unreadable:
    reasons = '; '.join(f'step {step}: {error}' for step, error in unreadable.items())
    raise UserError(
      f'no checkpoint in {checkpoints.directory} can be read ({reasons}); move that directory away '
      'to start afresh'
    )
  return None


def as_branch(config: Config, origin: Origin) -> Origin:
  """Return the origin; if the run is a decaying branch of `init_from`, with its lineage and id.

  A run with `train.decay_from` that keeps model, moments and step of `init_from` continues that
  run. So it has the same last growth and the same old tokens.
  """
  kept = config.grow.moments == 'pad' and config.grow.step == 'keep'
  if origin.other is None or not config.train.decay_from or not kept:
    return origin
  meta = origin.other.meta
  if meta.contents != 'model' or config.model != meta.config.model:
    return origin
  return dataclasses.replace(origin, lineage=meta.lineage, run=meta.run)


def begins_anew(config: Config, origin: Origin) -> bool:
  """Return whether a run begins from another one and counts its own steps from 0."""
  return origin.other is not None and config.grow.step == 'restart'


def batches(config: Config, origin: Origin) -> batches_lib.History:
  """Return the batches of all steps of a run, those before and after this start included."""
  meta = None if begins_anew(config, origin) else origin.meta
  return batches_lib.of_run(meta, config.data)
