"""Define tasks, the parts of a run that depend on its kind of model; `make` picks by that kind.

task.py       the interface for the loop, the step and growth
text.py       language models on text
distilled.py  language models on text, with a teacher
images.py     vision transformers on images
"""

import pkgutil
from typing import Any

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.tasks.task import Batch, Task

__all__ = [
  'Batch',
  'Task',
  'adapt',
  'adapted',
  'check_vocabulary',
  'data_size_key',
  'fill_in',
  'fill_in_unread',
  'known_examples',
  'make',
]

# The task of each `model.kind`, imported for runs of that kind, and the one with a teacher.
_TASKS = {
  'lm': 'tokenformer_jax.tasks.text:TextTask',
  'vit': 'tokenformer_jax.tasks.images:ImageTask',
}
_DISTILLED = 'tokenformer_jax.tasks.distilled:DistilledTextTask'


def _task_of(model: ModelConfig) -> type[Task]:
  return pkgutil.resolve_name(_TASKS[model.kind])


def fill_in(config: Config, trained: ModelConfig | None = None, *, resumed: bool = False) -> Config:
  """Replace sizes of 0, such as the vocabulary's, by the sizes that the data needs.

  Args:
    config: from `config.resolve`.
    trained: the model that the run continues from, which has all sizes, or None.
    resumed: whether `trained` is the run's own. Otherwise the task may adapt it to other data.

  Raises:
    UserError: a given size does not fit the data, or the data cannot be found.
  """
  return _task_of(config.model).fill_in(config, trained, resumed=resumed)


def fill_in_unread(config: Config) -> Config | None:
  """Fill in as `fill_in` does, but without reading data; return None if a size needs the data."""
  return _task_of(config.model).fill_in_unread(config)


def data_size_key(config: Config) -> str:
  """Return the key of the size that must come from the data if it is 0: see `Task`."""
  return _task_of(config.model).data_size_key


def known_examples(config: Config) -> int | None:
  """Return the number of examples in an epoch if it is known without reading data, else None."""
  return _task_of(config.model).known_examples(config)


def make(
  config: Config,
  vocabulary: dict[str, Any] | None = None,
  teacher: ModelConfig | None = None,
) -> Task:
  """Return the task of a run.

  Args:
    config: the config, with every size filled in.
    vocabulary: the vocabulary of the checkpoint that the run continues from, or None; see
      `Task.vocabulary`.
    teacher: the model that a step of the run learns from, or None: the task is for other uses than
      training, or the run has no teacher.
  """
  if teacher is not None and config.distill.weight:
    return pkgutil.resolve_name(_DISTILLED)(config, vocabulary, teacher)
  return _task_of(config.model)(config, vocabulary)


def check_vocabulary(config: Config, meta: Meta, where: str) -> None:
  """Check, without reading data, that a run keeps the meaning of a trained model's ids.

  Args:
    config: the config of the run.
    meta: the metadata of the checkpoint that it continues from.
    where: the name of that checkpoint in messages.

  Raises:
    UserError: the meaning differs.
  """
  _task_of(config.model).check_vocabulary(config, meta, where)


def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source model with the changes that the task makes for new data: see `adapt`."""
  return _task_of(target).adapted(source, target)


def adapt(
  params: Params, target: ModelConfig, seed: int | None, *, new_head: bool = False
) -> Params:
  """Return parameters with the shapes of a model from `adapted`.

  Args:
    params: the parameters of the source.
    target: the model from `adapted`.
    seed: the seed of new parameters; None if `params` are moments, which become zero there.
    new_head: whether to draw a new head even if the source's head has the right shape.
  """
  return _task_of(target).adapt(params, target, seed, new_head)
