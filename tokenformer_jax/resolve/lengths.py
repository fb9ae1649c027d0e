"""Find what the data decides about a run: its steps, and its position in the order of the data."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, DataConfig, names, stages, stages_after
from tokenformer_jax.config.mixture import shares
from tokenformer_jax.data.chat_template import Template, find_template
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.resolve.facts import Facts
from tokenformer_jax.resolve.origin import begins_anew
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs.checkpoint_meta import Meta


@dataclasses.dataclass(frozen=True)
class Lengths:
  """What the data decides about a run.

  Attributes:
    config: the config of the run's facts, with every length in steps.
    position: that of the first batch of the run in the order of the data.
    order_changes: the reasons why the order of samples differs from that of the checkpoint.
  """

  config: Config
  position: Position
  order_changes: Sequence[str] = ()


def find_lengths(facts: Facts) -> Lengths:
  """Return the lengths of a run, given its facts; the data of its task is open."""
  config, meta = facts.config, facts.origin.meta
  changes, position = [], BEGINNING
  if meta is not None and not begins_anew(config, facts.origin):
    changes = order_changes(config, meta, facts.task.digests)
    position = _position(config, meta, anew=bool(changes))
  return Lengths(in_steps(config, facts.task.examples, position), position, changes)


def _position(config: Config, meta: Meta, *, anew: bool) -> Position:
  """Return the position at which a run goes on after a checkpoint; `anew`: of a new order."""
  if anew or config.data.new_order_at == meta.step:
    return Position(meta.step, 0)
  now = stages_after(config.data, meta.step)[0].sequence_length
  before = batches_lib.until(batches_lib.history(meta), meta.step)
  length = before[-1].length if before else now
  return Position(meta.step, meta.seen.samples).in_length(length, now)


def order_changes(config: Config, meta: Meta, digests: Sequence[str] = ()) -> list[str]:
  """Return the reasons why the order of samples differs from the checkpoint's.

  Weights and sizes of batches are compared up to the step of the checkpoint. `digests` are those of
  the data (`Task.digests`); empty: the data is not read yet.
  """
  (sizes, weights), (old_sizes, old_weights) = (
    _before(one.data, meta.step) for one in (config, meta.config)
  )
  varies = any(
    source.weight_by_step for one in (config, meta.config) for source in one.data.mixture.values()
  )
  same = {'weights': weights == old_weights, 'sizes': sizes == old_sizes or not varies}
  reasons: dict[str, list[str]] = collections.defaultdict(list)
  for path, now, old in config_lib.differences(config, meta.config):
    key = names.find(path)
    order = key.order if key else 'samples' if path == 'data.mixture' else ''
    reasons[order].append(f'config.{path} is {now!r} and was {old!r}')
  changed = ('samples', *(order for order in same if not same[order]))
  changes = [reason for order in changed for reason in reasons[order]]
  if not digests or meta.seen.digest in digests:
    return changes
  texts = reasons['text'] or (not changes and reasons['weights'])
  if meta.seen.digest and not texts and not reasons['weights']:
    source = f'config.data.source={config.data.source}'
    named = 'a source of config.data.mixture' if config.data.mixture else source
    data: Any = config.data  # its section for text
    chat = meta.tokenizer.get('chat') if data.has_chat else None
    if chat and (now := find_template(data)).fingerprint != Template(**chat).fingerprint:
      named = now.name
    texts = [f'{named} has other content than it had']
  return changes + (texts or [])


def _before(data: DataConfig, step: int) -> tuple[Sequence[Any], Sequence[Any]]:
  """Return the sizes of batches and the weights of the sources in the steps before one."""
  sizes = [stage for stage in stages(data) if stage.first < step]
  if not data.mixture:
    return sizes, ()
  of_all = shares(data.mixture)
  rows = zip((0, *of_all.steps[1:]), of_all.counts, strict=True)
  return sizes, [(of_all.names, *row) for row in rows if row[0] < max(1, step)]


def in_steps(config: Config, examples: int, position: Position = BEGINNING) -> Config:
  """Return the config with lengths in epochs or examples converted to steps.

  `examples` is the number in an epoch. The examples before `position` count as seen.
  """
  data, train, optim = config.data, config.train, config.optim
  steps, warmup_steps = train.steps, optim.warmup_steps
  if train.epochs or train.examples:
    steps = steps_to(data, train.examples or train.epochs * examples, position)
  if optim.warmup_epochs:
    warmup_steps = steps_to(data, optim.warmup_epochs * examples)
  return dataclasses.replace(
    config,
    train=dataclasses.replace(train, steps=steps, epochs=0.0, examples=0),
    optim=dataclasses.replace(optim, warmup_steps=warmup_steps, warmup_epochs=0.0),
  )


def steps_to(data: DataConfig, examples: float, position: Position = BEGINNING) -> int:
  """Return the step at which a run from a position has seen so many examples of the order.

  In a stage of shorter sequences, a sequence is a part of an example.
  """
  stages = stages_after(data, position.step)
  ends, length = [*(stage.first for stage in stages[1:]), math.inf], stages[0].sequence_length
  for stage, end in zip(stages, ends, strict=True):
    position = position.in_length(length, stage.sequence_length)
    samples = examples * (data.sequence_length // stage.sequence_length)
    steps = math.ceil((samples - position.sample) / stage.batch_size)
    if stage.first + steps <= end:
      return stage.first + steps
    position = Position(end, position.batch_start(end, stage.batch_size))
    length = stage.sequence_length
  raise AssertionError('the last stage has no end')
