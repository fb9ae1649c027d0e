"""Keep the arrays and compiled programs of a run in memory while it is used from Python."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import arguments
from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding import buckets, evaluation, trained
from tokenformer_jax.decoding.score import Scorer
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.decoding.writer import Writer
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import verify
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.teacher import Teacher
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import frozen_base, last_growth
from tokenformer_jax.tasks import Batch, Task, validation


class Loaded:
  """A checkpoint in use; each part is read or compiled when it is first needed, and kept."""

  def __init__(self, source: str, model: Trained | None = None):
    """Keep the checkpoint's name, DIR@STEP, or its model if it is in memory."""
    self._source, self._given = source, model
    self._clipped: dict[int, Loaded] = {}
    self._programs: dict[bool, Callable[[Params, Batch], jax.Array]] = {}
    self._scorers: dict[tuple[int | None, int | None], Scorer] = {}

  @functools.cached_property
  def model(self) -> Trained:
    """Return the model on all devices."""
    if self._given is not None:
      return self._given
    return trained.load(self._source, check=checkpoint.check_is_model)

  @functools.cached_property
  def writer(self) -> Writer:
    """Return the model's writer of texts."""
    return Writer.from_trained(self.model)

  def clipped(self, clip: int | None) -> 'Loaded':
    """Return the same parameters with `positions.clip` (see `length.with_clip`); None: this."""
    if clip is None:
      return self
    if clip not in self._clipped:
      self._clipped[clip] = Loaded(self._source, self.model.with_clip(clip))
    return self._clipped[clip]

  def scorer(self, max_length: int | None, batch_size: int | None) -> Scorer:
    """Return the scorer of rows: see `evaluation.make_scorer`."""
    key = (max_length, batch_size)
    if key not in self._scorers:
      self._scorers[key] = evaluation.make_scorer(self.model, max_length, batch_size)
    return self._scorers[key]

  def text_logits(self, rows: list[np.ndarray], *, exact: bool) -> np.ndarray:
    """Return the logits of token ids.

    Args:
      rows: int32 [T] each, of unequal lengths.
      exact: see `_logits`.

    Returns:
      float32 [B, T, V], NaN after the end of a row.
    """
    longest, model = max(map(len, rows)), self.model.config.model
    length = buckets.bucket(longest)  # Buckets of lengths keep the number of programs small.
    if model.position_embedding == 'learned':
      self.model.context_length(longest)
      length = min(length, model.max_length)
    # The last column is an unused target. Padding takes no places of experts.
    batch = np.full((len(rows), length + 1), -1, np.int32)
    for row, ids in zip(batch, rows, strict=True):
      row[: len(ids)] = ids
    logits_BxTxV = self._logits(batch, exact)[:, :longest]
    for logits_TxV, ids in zip(logits_BxTxV, rows, strict=True):
      logits_TxV[len(ids) :] = np.nan
    return logits_BxTxV

  def image_logits(self, inputs: Any, *, exact: bool) -> np.ndarray:
    """Return the logits of images uint8 [B, S, S, C]: float32 [B, classes]."""
    config = self.model.config
    size, channels = config.data.image_size, config.model.channels
    shape = (size, size, channels)
    wanted = f'they must be images, uint8 [B, {size}, {size}, {channels}]'
    images = _array(inputs, wanted)
    if images.shape[1:] != shape or images.dtype != np.uint8 or not len(images):
      raise UserError(f'inputs are {images.dtype} {list(images.shape)}; {wanted}')
    return self._logits({'images': images, 'labels': np.zeros(len(images), np.int32)}, exact)

  def _logits(self, batch: Batch, exact: bool) -> np.ndarray:
    """Return the logits of a batch of the task.

    Args:
      batch: arrays with the leading axis B, of any length.
      exact: whether to compute in float32 with products in full precision.
    """
    mesh, count = self.model.mesh, len(jax.tree.leaves(batch)[0])
    if exact not in self._programs:
      task = self._task(exact)
      self._programs[exact] = jax.jit(
        lambda params, batch: task.logits(params, batch)[0],
        out_shardings=sharding.replicated(mesh),
      )
    precision = jax.default_matmul_precision('highest' if exact else None)
    with jax.set_mesh(mesh), precision:
      rows = buckets.rows(count)
      padded = jax.tree.map(
        lambda a: np.concatenate([a, np.zeros((rows - count, *a.shape[1:]), a.dtype)]), batch
      )
      sharded = jax.device_put(padded, sharding.batch_sharding(mesh))
      logits = self._programs[exact](self.model.params, sharded)
    return np.array(logits[:count], np.float32)

  def _task(self, exact: bool = False) -> Task:
    config = self.model.config
    if exact:
      return verify.exact_task(config, config.model)
    # The training's attention kernel may be for another kind of device.
    train = dataclasses.replace(config.train, attention='auto', remat='auto')
    return tasks.make(dataclasses.replace(config, train=train))

  def validate(self) -> dict[str, float]:
    """Return the figures of the run's own validation data."""
    task, eval_step = self._validation
    mesh = self.model.mesh
    rows = range(task.config.data.batch_size)
    with jax.set_mesh(mesh):
      return validation.figures(task, eval_step, {'': self.model.params}, rows, mesh)

  @functools.cached_property
  def _validation(self) -> tuple[Task, Callable[[Params, Batch], Any]]:
    """Return the task with its data open, and its compiled evaluation step."""
    model = self.model
    config = self._task().config
    with jax.set_mesh(model.mesh):
      rows = buckets.rows(config.data.batch_size)
    data = dataclasses.replace(config.data, batch_size=rows)
    config = dataclasses.replace(config, data=data)
    before = frozen_base(last_growth(model.meta.lineage, config.model), config)
    record = model.meta.teacher if data.has_pairs else None
    teacher = record and Teacher(record, checkpoint.open_source(record.source))
    task = tasks.make(config, model.meta.tokenizer, teacher and teacher.meta.config.model, before)
    task.prepare()
    step = step_lib.make_eval_step(task, model.mesh)
    fixed = [teacher.read(model.mesh)] if teacher else []
    return task, lambda params, batch: step(params, batch, *fixed)


def rows_of_ids(inputs: Any, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[np.ndarray]:
  """Return the token ids [T] of each text, or the rows of ids [B, T]."""
  texts = [inputs] if isinstance(inputs, str) else inputs
  if not np.iterable(texts) or not (several := list(texts)):
    raise UserError(
      f'inputs is {arguments.shown(inputs)}: there are no inputs; give a text, several texts, or '
      'token ids [B, T]'
    )
  if all(isinstance(text, str) for text in several):
    return [tokenizer.start(tokenizer.encode(text)).astype(np.int32) for text in several]
  wanted = f'they must be integers [B, T] from 0 to {vocab_size - 1}, or texts'
  ids = _array(inputs, wanted)
  if ids.ndim != 2 or ids.dtype.kind not in 'iu' or not ids.size:
    raise UserError(f'inputs are {ids.dtype} {list(ids.shape)}; {wanted}')
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise UserError(f'inputs are ids from {ids.min()} to {ids.max()}; {wanted}')
  return list(ids.astype(np.int32))


def _array(inputs: Any, wanted: str) -> np.ndarray:
  """Return inputs as an array; `wanted` is the end of the message if they are none."""
  try:
    return np.asarray(inputs)
  except (ValueError, TypeError) as error:  # such as rows of unequal lengths
    raise UserError(f'inputs is {arguments.shown(inputs)}, which is no array; {wanted}') from error
