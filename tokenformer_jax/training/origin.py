"""Find the checkpoint that a run continues from, and its position in the data.

A model is its parameters and the meaning of its ids, so a run keeps the tokenizer or the classes of
the checkpoint that it continues from. `continuation.py` checks that it may continue from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, ModelConfig, stages_after
from tokenformer_jax.data.chat_template import Template, find_template
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta, new_run_id
from tokenformer_jax.storage import paths

Damaged = Mapping[int, checkpoint.DamagedError]

# Keys that decide the batch of a step, besides the data, the batch size and the position.
_ORDER_KEYS = ('train.seed', 'data.sequence_length')
# Keys that decide the data, for checkpoints without a digest of the data.
_DATA_KEYS = (
  'data.source',
  'data.rows',
  'data.packing',
  'data.text_field',
  'data.chat_template',
  'data.document_separator',
  'data.deduplicate',
  'data.validation_source',
  'data.validation_fraction',
)


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


def position(config: Config, origin: Origin, digest: str) -> Position:
  """Return the position at which a run begins in the order of its data, whose digest is given."""
  meta = origin.meta
  if meta is None or begins_anew(config, origin):
    return BEGINNING
  if config.data.new_order_at == meta.step or order_changes(config, meta, digest):
    return Position(meta.step, 0)
  now = stages_after(config.data, meta.step)[0].sequence_length
  before = batches_lib.until(batches_lib.history(meta), meta.step)
  length = before[-1].length if before else now
  return Position(meta.step, meta.seen.samples).in_length(length, now)


def batches(config: Config, origin: Origin) -> batches_lib.History:
  """Return the batches of all steps of a run, those before and after this start included."""
  meta = None if begins_anew(config, origin) else origin.meta
  return batches_lib.of_run(meta, config.data)


def order_changes(config: Config, meta: Meta, digest: str | None) -> list[str]:
  """Return the reasons why the order of samples differs from the checkpoint's.

  `digest` is that of the data; None: the data is not read yet.
  """
  differences = {one.path: one for one in config_lib.differences(config, meta.config)}

  def differing(keys: tuple[str, ...]) -> list[str]:
    values = [differences[key] for key in keys if key in differences]
    return [f'config.{key} is {now!r} and was {old!r}' for key, now, old in values]

  texts, weights = [], []
  for path, now, old in differences.values():
    if path.startswith('data.mixture') and not path.endswith('.store'):
      kind = texts if path.endswith('source') else weights
      kind.append(f'config.{path} is {now!r} and was {old!r}')
  changes = [*differing((*_ORDER_KEYS, *_batch_keys(config, meta.config))), *weights]
  if digest is None or meta.seen.digest == digest:
    return changes
  changed = [*differing(_DATA_KEYS), *texts]
  if meta.seen.digest and not changed and not weights:
    source = f'config.data.source={config.data.source}'
    named = 'a source of config.data.mixture' if config.data.mixture else source
    data: Any = config.data  # its section for text
    chat = meta.tokenizer.get('chat') if data.has_chat else None
    if chat and (now := find_template(data)).fingerprint != Template(**chat).fingerprint:
      named = now.name
    changed = [f'{named} has other content than it had']
  return changes + changed


def _batch_keys(*configs: Config) -> tuple[str, ...]:
  """Return the sizes of batches if they decide the order: see `data.mixture`."""
  varies = any(one.weight_by_step for c in configs for one in c.data.mixture.values())
  sizes = ('data.batch_size', 'data.batch_size_by_step', 'data.sequence_length_by_step')
  return sizes if varies else ()
