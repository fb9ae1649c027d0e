"""Read a finished run as a point of a law: its sizes, tokens, FLOPs, loss and data."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.config.groups import as_text, frozen_numbers
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops, models
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint, curves, saved_config
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import schedules
from tokenformer_jax.storage import paths

# Keys of training that is not plain. `FinishedRun.data` has '' for a plain run.
SPECIAL_TRAINING = ('distill.teacher', 'train.nested_rows', 'frozen groups')
_DECAYED = 0.2  # a rate at or below this share of its peak counts as decayed


@dataclasses.dataclass(frozen=True)
class Size:
  """The size of a model."""

  parameters: int
  active: int  # those that one token uses; fewer than `parameters` in a mixture of experts
  flops_per_token: float  # exact model FLOPs of training on one token: see `flops.train_flops`


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """A run that reached its last step."""

  name: str  # its work directory
  size: Size
  tokens: int  # those that the model has seen, before a growth and in a stable run included
  loss: float  # the last loss on the validation text, in nats a token; NaN if it was not finite
  decayed: bool  # whether the rate had decayed at the end
  # The conditions of its loss besides the model and the plain training, by name.
  data: dict[str, str]
  growth: 'Growth | None' = None  # the last one


@dataclasses.dataclass(frozen=True)
class Growth:
  """A growth in the past of a run: the size before it, and the tokens seen until then."""

  size: Size
  tokens: int


def check_loss(config: Config, where: str, what: str, advice: str) -> None:
  """Check that the loss of a config is one of text, in nats a token, as `what` needs.

  `where` names the config in the message, and `advice` says what to do.
  """
  unit = config.data.loss_unit
  if unit != 'token':
    key = f'preference.loss={config.preference.loss}' if unit == 'pair' else 'model.kind=vit'
    raise UserError(
      f'{where} has {key}, whose loss is a mean over {unit}s, and {what} is about nats a token of '
      f'text; {advice}'
    )


@functools.lru_cache(maxsize=256)
def _measure(model: ModelConfig, length: int) -> Size:
  definition = models.define(model)
  return Size(definition.count, definition.active, flops.train_flops(model, length))


def measure_size(config: Config) -> Size:
  """Count the parameters and FLOPs of a config whose sizes are filled in."""
  size = _measure(config.model, config.data.sequence_length)
  if not config.train.nested_rows:
    return size
  return dataclasses.replace(size, flops_per_token=flops.unit_flops(config))


def read(workdir: str) -> FinishedRun:
  """Return a finished run."""
  path = paths.parse_path(workdir)
  lines = curves.read(path)
  config = saved_config.read(path / 'config.json', 'give the --workdir of a training run')
  check_loss(config, workdir, 'a law', 'leave it out')
  last, steps = lines[-1]['step'], config.train.steps
  if not (is_finished(path, steps) and (losses := last_losses(lines, steps))):
    at = f'step {last:,} of {steps:,}' if last < steps else f'step {last:,}, which is not saved'
    raise UserError(
      f'{workdir} is not finished: it is at {at}; finish it by `train --workdir={workdir}`, or '
      'leave it out'
    )
  meta, loss = checkpoint.open_directory(path).meta, losses[-1]
  batches = batches_lib.of_run(meta, config.data)
  return FinishedRun(
    name=workdir,
    size=measure_size(config),
    tokens=round(batches_lib.all_tokens(meta.lineage, batches, steps)),
    loss=math.nan if loss is None else loss,
    decayed=_has_decayed(config),
    data=_data(config, meta),
    growth=_growth(meta),
  )


def is_finished(workdir: paths.Path, steps: int) -> bool:
  """Return whether a run has saved its last step."""
  return paths.exists(workdir / 'checkpoints' / str(steps))


def last_losses(lines: Sequence[dict[str, float]], steps: int) -> list[float | None]:
  """Return the losses of the last step among a run's figures."""
  return [line['eval/loss'] for line in lines if line['step'] == steps and 'eval/loss' in line]


def _has_decayed(config: Config) -> bool:
  """Return whether the rate of the last update was a small share of the peak."""
  steps, train = config.train.steps, config.train
  rate = schedules.learning_rate(config.optim, steps, decay_from=train.decay_from)
  return schedules.fraction_of_peak(rate, config.optim, steps) <= _DECAYED


def _data(config: Config, meta: Meta) -> dict[str, str]:
  """Return the values that two runs must share for their losses to be comparable."""
  data, distill, nested, teacher = config.data, config.distill, config.train.nested_rows, ''
  if meta.teacher:
    how = f'weight {distill.weight:g}, temperature {distill.temperature:g}'
    teacher = f'{meta.teacher.source} ({how})'
  special = teacher, str(nested or ''), as_text(frozen_numbers(config.model))
  return {
    'tokenizer': tokenizers.from_json(meta.tokenizer).fingerprint,
    'text': meta.seen.digest or data.source,
    'validation text': f'{data.validation_source}, fraction {data.validation_fraction:g}',
    'data.sequence_length': data.sequence_length_by_step or str(data.sequence_length),
    'train.eval_batches': str(config.train.eval_batches),
    **dict(zip(SPECIAL_TRAINING, special, strict=True)),
  }


def _growth(meta: Meta) -> Growth | None:
  if not meta.lineage:
    return None
  size = _measure(meta.lineage[-1].model, meta.config.data.sequence_length)
  return Growth(size, round(meta.lineage[-1].tokens))
