"""Find the checkpoint that a run continues from, and check that the run may continue from it.

A model is its parameters and the meaning of its ids, so a run keeps the tokenizer or the classes of
the checkpoint that it continues from. The run also keeps its place in the data: see `position`.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax import tasks
from tokenformer_jax.config import (
  Config,
  DataConfig,
  GrowConfig,
  ModelConfig,
  lookup,
  stages_after,
)
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta, new_run_id
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.last_growth import last_growth
from tokenformer_jax.steps.optim import LastGrowth
from tokenformer_jax.storage import paths
from tokenformer_jax.training import init_from

Damaged = Mapping[int, checkpoint.DamagedError]

# Keys that decide the batch of a step, besides the data, the batch size and the position.
_ORDER_KEYS = ('train.seed', 'data.sequence_length')
# Keys that decide the data, for checkpoints without a digest of the data.
_DATA_KEYS = (
  'data.source',
  'data.text_field',
  'data.deduplicate',
  'data.validation_source',
  'data.validation_fraction',
)
# Keys that change neither the resulting model nor its figures.
_UNREPORTED = (
  'data.cache_dir',
  'data.store',
  'data.cache_gb',
  'data.workers',
  'data.prefetch',
  'train.log_every',
  'train.checkpoint_every',
  'train.keep_checkpoints',
  'train.sample_tokens',
  'train.sample_prompt',
  'train.profile_steps',
  'train.trackers',
  'train.compilation_cache',
)


@dataclasses.dataclass(frozen=True)
class Origin:
  """The start of a run: its own checkpoint, another run to grow, or nothing.

  Attributes:
    meta: the metadata of the checkpoint.
    where: the name of the checkpoint in messages.
    lineage: the growths and other actions that made the run's model.
    source: the checkpoints of the other run.
    damaged: the newer checkpoints of the run that cannot be read, by step.
    run: the id of the run: see `RunName`.
  """

  meta: Meta | None = None
  where: str = ''
  lineage: Lineage = ()
  source: checkpoint.Checkpoints | None = None
  damaged: Damaged = dataclasses.field(default_factory=dict)
  run: str = ''

  @property
  def resumes(self) -> bool:
    """Return whether the checkpoint is the run's own."""
    return self.meta is not None and self.source is None

  @property
  def model(self) -> ModelConfig | None:
    """Return the model of the checkpoint, or None."""
    return self.meta and self.meta.config.model

  @property
  def vocabulary(self) -> dict[str, Any] | None:
    """Return the meaning of the ids of the checkpoint's model: see `Task.vocabulary`."""
    return self.meta and self.meta.tokenizer


FROM_SCRATCH = Origin()


def find(config: Config, workdir: paths.Path, damaged: Damaged) -> Origin:
  """Return the newest checkpoint in the work directory, or the one of `config.init_from`.

  `damaged` are checkpoints in the work directory whose arrays cannot be read, by step.

  Raises:
    UserError: all checkpoints in the work directory are damaged; or `config.init_from` is not a
      run, or cannot be read.
  """
  if own := _newest(workdir, damaged):
    return own
  run = hosts.from_first(new_run_id)
  if not config.init_from:
    return Origin(run=run)
  source, meta, lineage = init_from.open_source(config)
  return Origin(meta, f'config.init_from={config.init_from}', lineage, source, run=run)


def _newest(workdir: paths.Path, damaged: Damaged) -> Origin | None:
  """Return the newest checkpoint that can be read, or None if there is no checkpoint."""
  passed = {}
  with contextlib.closing(checkpoint.Checkpoints(workdir)) as checkpoints:
    for step in reversed(checkpoints.common_steps()):
      try:
        if step in damaged:
          raise damaged[step]
        meta = checkpoints.meta(step)
      except checkpoint.DamagedError as error:
        passed[step] = error
        continue
      checkpoint.check_is_model(meta, workdir)
      return Origin(meta, in_workdir(step), meta.lineage, damaged=passed, run=meta.run)
  if passed:
    reasons = '; '.join(f'step {step}: {error}' for step, error in passed.items())
    raise UserError(
      f'no checkpoint in {checkpoints.directory} can be read ({reasons}); move that directory away '
      'to start afresh'
    )
  return None


def in_workdir(step: int) -> str:
  """Return the name of a checkpoint of the run for messages."""
  return f'the checkpoint of step {step} in this work directory'


def check(config: Config, origin: Origin) -> None:
  """Check model, vocabulary and order of the data before any data is read.

  `config` has every size filled in.

  Raises:
    UserError: the checkpoint's model cannot be grown to this one, its tokenizer differs, it has
      seen its data in another order, or a key of the config has no effect at this start.
  """
  _check_growth_used(config, origin)
  if origin.meta is None:
    _check_new_order_used(config, origin)
    return
  if origin.resumes:
    check_same_model(config, origin.meta.config, origin.where)
  else:
    init_from.check(config, origin.meta, origin.where)
  check_same_optimizer(config, origin.meta, origin.where, resumes=origin.resumes)
  check_order(config, origin)
  _check_new_order_used(config, origin)
  tasks.task_class(config.model).check_vocabulary(config, origin.meta, origin.where)


def _check_growth_used(config: Config, origin: Origin) -> None:
  """Check that a run grows if keys of the group `grow` are set, or has grown by these values.

  Raises:
    UserError: it does not.
  """
  if origin.source is not None:
    return
  known = origin.meta.config.grow if origin.meta else GrowConfig()
  for one in config_lib.differences(config.grow, known, 'grow.'):
    if one.ours != lookup(Config(), one.path):
      raise UserError(
        f'config.{one.path} is {one.ours!r}, which has an effect only where a run begins from '
        f'config.init_from, and this one {_begins(origin)}; leave it out'
      )


def _check_new_order_used(config: Config, origin: Origin) -> None:
  """Check that `data.new_order_at` is the step where this run goes on, or went on earlier.

  Raises:
    UserError: it is another one.
  """
  order_at = config.data.new_order_at
  kept = origin.resumes and order_at <= origin.meta.step  # A smaller one was used before.
  follows = origin.source is not None and config.grow.step == 'keep'
  if order_at and not kept and not (follows and order_at == origin.meta.step):
    raise UserError(
      f'config.data.new_order_at is {order_at}, which has an effect only where a run goes on from '
      f'the checkpoint of step {order_at}, and this one {_begins(origin)}; leave it out'
    )


def _begins(origin: Origin) -> str:
  """Return how a run begins, as the end of a sentence."""
  if origin.meta is None:
    return 'begins with new parameters'
  return f'goes on from {origin.where}' if origin.resumes else f'begins from {origin.where}'


def as_branch(config: Config, origin: Origin) -> Origin:
  """Return the origin; if the run is a decaying branch of `init_from`, with its lineage and id.

  A run with `train.decay_from` that keeps model, moments and step of `init_from` continues that
  run. So it has the same last growth and the same old tokens.
  """
  kept = config.grow.moments == 'pad' and config.grow.step == 'keep'
  if origin.source is None or not config.train.decay_from or not kept:
    return origin
  if origin.meta.contents != 'model' or config.model != origin.model:
    return origin
  return dataclasses.replace(origin, lineage=origin.meta.lineage, run=origin.meta.run)


def check_branch(config: Config, origin: Origin, growth: LastGrowth | None) -> None:
  """Check that the decay of `train.decay_from` can begin after the checkpoint of the origin.

  `config` has all lengths in steps.

  Raises:
    UserError: the decay would begin in the past, or inside a warm-up, or the checkpoint is from
      within another decay.
  """
  meta, begin = origin.meta, config.train.decay_from
  if not begin:
    return
  restarted = schedules.first_update(config.optim, growth)
  warm = restarted + config.optim.warmup_steps
  if restarted and begin < warm:
    raise UserError(
      f'config.train.decay_from is {begin}, which is inside the warm-up after the last growth, to '
      f'update {warm}; set it to that or more, or set config.optim.restart_schedule=no'
    )
  if meta is None or _begins_anew(config, origin):
    return
  if origin.resumes and meta.config.train.decay_from == begin:
    return
  if meta.updates > begin:
    raise UserError(
      f'config.train.decay_from is {begin}, but {origin.where} has made {meta.updates} updates, so '
      'the decay would have begun in the past; set it to that number or more, or start from an '
      'earlier checkpoint (--workdir=NEW_DIR --config.init_from=DIR@STEP)'
    )
  if _is_decaying(meta):
    theirs = meta.config
    raise UserError(
      f'config.train.decay_from is {begin}, but the rate of {origin.where} has begun to decay '
      f'already (optim.schedule={theirs.optim.schedule.kind} of {theirs.train.steps} steps); start '
      'from an earlier checkpoint (--config.init_from=DIR@STEP), or from a run with '
      'optim.schedule=wsd or constant'
    )


def _is_decaying(meta: Meta) -> bool:
  """Return whether the rate of a checkpoint's last update was below the peak after its warm-up."""
  optim, train = meta.config.optim, meta.config.train
  growth = last_growth(meta.lineage, meta.config.model)
  if meta.updates - schedules.first_update(optim, growth) <= optim.warmup_steps:
    return False
  rate = schedules.schedule(optim, train.steps, growth, train.decay_from)
  return schedules.fraction_of_peak(rate, optim, meta.updates - 1) < 1 - 1e-6


def check_same_model(config: Config, theirs: Config, where: str) -> None:
  """Check that a checkpoint has the run's model.

  Raises:
    UserError: the models differ; the message has the keys.
  """
  found = list(config_lib.differences(config.model, theirs.model, 'model.'))
  if not found:
    return
  advice = 'set these keys to its values, or choose another one'
  paths_found = [difference.path for difference in found]
  if all(
    path.endswith(('.tokens', '.reference', '.groups', 'model.pattern')) for path in paths_found
  ):
    counts = config_lib.counts_as_text(config_lib.token_counts(config.model))
    sizes = [f'--param_tokens={counts}'] if paths_found != ['model.pattern'] else []
    sizes += [f"--pattern='{config.model.pattern}'"] if 'model.pattern' in paths_found else []
    advice += (
      f' (to have it grow: tokenformer grow --source=DIR --target=NEW_DIR {" ".join(sizes)})'
    )
  differing = [f'{path} is {old!r} there and {new!r} in the config' for path, new, old in found]
  raise UserError(f'{where} is of another model: {"; ".join(differing)}; {advice}')


def check_same_optimizer(config: Config, meta: Meta, where: str, *, resumes: bool = True) -> None:
  """Check that a checkpoint has the statistics of the run's optimizer, if the run keeps them.

  Raises:
    UserError: it has those of another optimizer.
  """
  ours, theirs = config.optim.kind, meta.config.optim.kind
  if ours == theirs or meta.contents != 'model' or (not resumes and config.grow.moments == 'drop'):
    return
  advice = 'set config.grow.moments=drop, with which the new one begins with empty statistics'
  if resumes:
    advice = (
      'start another run from it with the new one (--workdir=NEW_DIR --config.init_from=DIR '
      '--config.grow.moments=drop)'
    )
  raise UserError(
    f'config.optim.kind is {ours}, but {where} was trained with {theirs}, whose statistics mean '
    f'nothing to {ours}; set it to {theirs}, or {advice}'
  )


def check_order(config: Config, origin: Origin, digest: str | None = None) -> None:
  """Check that a resumed run keeps the order of its data, or that the user asked for another order.

  Only another `data.source`, other sources of a mixture, or `init_from` count as asking for other
  data. `digest` is that of the data; None: the data is not read yet.

  Raises:
    UserError: the run would see some samples again and others never, without being asked to.
  """
  meta = origin.meta
  if not origin.resumes or not meta.seen.samples or config.data.new_order_at == meta.step:
    return
  if _sources(config.data) != _sources(meta.config.data):
    return
  if changes := _changes(config, meta, digest):
    raise UserError(
      f'{" and ".join(changes)}, so the data would come in another order than the one in which '
      f'{origin.where} has seen {meta.seen.samples:,} samples; put that back, choose another '
      f'--workdir, or set config.data.new_order_at={meta.step}, which begins the new order with '
      'its first sample'
    )


def check_data(config: Config, origin: Origin, task: tasks.Task) -> None:
  """Check the open data against the checkpoint that the run continues from.

  Raises:
    UserError: the labels have another meaning than in the run's own checkpoint, or the order of the
      data differs: see `check_order`.
  """
  if origin.resumes and (reason := task.other_meaning):
    raise UserError(
      f'{origin.where} does not fit config.data.source={config.data.source}: {reason}; choose the '
      'images that it was trained on, or start another run from it, with a new head '
      '(--workdir=NEW_DIR --config.init_from=DIR)'
    )
  check_order(config, origin, task.digest)


def position(config: Config, origin: Origin, digest: str) -> Position:
  """Return the place in the order of its data, whose digest is given, where a run begins."""
  meta = origin.meta
  if meta is None or _begins_anew(config, origin):
    return BEGINNING
  if config.data.new_order_at == meta.step or _changes(config, meta, digest):
    return Position(meta.step, 0)
  now = stages_after(config.data, meta.step)[0].sequence_length
  before = batches_lib.until(batches_lib.history(meta), meta.step)
  length = before[-1].length if before else now
  return Position(meta.step, meta.seen.samples).in_length(length, now)


def batches(config: Config, origin: Origin) -> batches_lib.History:
  """Return the batches of all steps of a run, those before and after this start included."""
  continues = origin.meta is not None and not _begins_anew(config, origin)
  return batches_lib.of_run(origin.meta if continues else None, config.data)


def _begins_anew(config: Config, origin: Origin) -> bool:
  """Return whether a run begins from another one and counts its own steps from 0."""
  return origin.source is not None and config.grow.step == 'restart'


def say_changes(config: Config, origin: Origin, begins: Position, digest: str) -> None:
  """Print where a run starts, the settings that it changes, and a new order of its data.

  `config` has every size and length filled in; `begins` is from `position`.
  """
  meta = origin.meta
  if meta is None:
    return
  if origin.source is not None:
    messages.say(init_from.description(config, meta))
  if changed := _changes_of_settings(config, origin):
    messages.say(f'different from step {meta.step} on: {"; ".join(changed)}')
  if begins.step and meta.seen.samples and not begins.sample:
    changes = _changes(config, meta, digest) or ['config.data.new_order_at asks for it']
    messages.say(
      f'a new order of the data begins after step {begins.step} with its first sample: '
      f'{" and ".join(changes)}'
    )


def check_finished(config: Config, origin: Origin, section: str = '') -> None:
  """Check that a run whose checkpoint has made all steps has no other settings than it.

  The number of steps, the mesh and the way in which layers run may differ: none asks for another
  model. `config` has every size and length filled in. With `section`, such as 'data.', only keys
  of this section are compared.

  Raises:
    UserError: a setting differs, and no step would be made with it.
  """
  changed = [
    change
    for change in _changes_of_settings(config, origin)
    if not change.startswith(('train.steps:', 'train.remat:', 'train.layers:', 'mesh.'))
    and change.startswith(section)
  ]
  if changed:
    raise UserError(
      f'{origin.where} has made config.train.steps={config.train.steps} steps already, so none '
      f'would be made with what differs from its settings ({"; ".join(changed)}); choose '
      '--workdir=NEW_DIR to train a new run, or raise config.train.steps to go on with this one'
    )


def _changes_of_settings(config: Config, origin: Origin) -> list[str]:
  """Return the changed settings of a resumed run as `key: old -> new`, and the ignored ones."""
  meta = origin.meta
  # A converted model has no earlier settings to compare with.
  if meta is None or not origin.resumes or meta.contents != 'model':
    return []
  changed = _changed(config, meta.config)
  if config.init_from and config.init_from != meta.config.init_from:
    changed.append(f'init_from={config.init_from} is ignored, because there is a checkpoint')
  if config.distill.init != meta.config.distill.init:
    changed.append(f'distill.init={config.distill.init} is ignored, because there is a checkpoint')
  return changed


def _changes(config: Config, meta: Meta, digest: str | None) -> list[str]:
  """Return the reasons why the order of samples differs from the checkpoint's."""

  def differing(keys: tuple[str, ...]) -> list[str]:
    values = [(key, lookup(config, key), lookup(meta.config, key)) for key in keys]
    return [f'config.{key} is {now!r} and was {old!r}' for key, now, old in values if now != old]

  texts, weights = [], []
  for path, now, old in config_lib.differences(config.data, meta.config.data, 'data.'):
    if path.startswith('data.mixture') and not path.endswith('.store'):
      found = texts if path.endswith('source') else weights
      found.append(f'config.{path} is {now!r} and was {old!r}')
  changes = [*differing((*_ORDER_KEYS, *_batch_keys(config, meta.config))), *weights]
  if digest is None or meta.seen.digest == digest:
    return changes
  changed = [*differing(_DATA_KEYS), *texts]
  if meta.seen.digest and not changed and not weights:
    source = f'config.data.source={config.data.source}'
    named = 'a source of config.data.mixture' if config.data.mixture else source
    changed = [f'{named} has other content than it had']
  return changes + changed


def _sources(data: DataConfig) -> set[str]:
  """Return the sources that a run trains on or evaluates."""
  return {one.source for one in data.mixture.values()} or {data.source}


def _batch_keys(*configs: Config) -> tuple[str, ...]:
  """Return the sizes of batches if they decide the order: see `data.mixture`."""
  varies = any(one.weight_by_step for c in configs for one in c.data.mixture.values())
  sizes = ('data.batch_size', 'data.batch_size_by_step', 'data.sequence_length_by_step')
  return sizes if varies else ()


def _changed(ours: Config, theirs: Config) -> list[str]:
  """Return the keys whose values differ, as `key: old -> new`."""
  # The keys of `grow` and a beginning have no more effect.
  return [
    f'{path}: {old!r} -> {new!r}'
    for path, new, old in config_lib.differences(ours, theirs)
    if path not in ('init_from', 'distill.init')
    and not path.startswith('grow.')
    and re.sub(r'^data\.mixture\.\w+\.', 'data.', path) not in _UNREPORTED
  ]
