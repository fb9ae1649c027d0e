"""Tasks: what of a run depends on its kind of model. `make` picks by `config.model.kind`.

task.py    the interface that the loop, the step and growth work with
text.py    language models on text
images.py  vision transformers on images
"""

from typing import Any

from tokenformer_jax.checkpoint_meta import Meta
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.params import Params
from tokenformer_jax.tasks.images import ImageTask
from tokenformer_jax.tasks.task import Batch, Task
from tokenformer_jax.tasks.text import TextTask

__all__ = [
  'Batch',
  'Task',
  'adapt',
  'adapted',
  'check_vocabulary',
  'fill_in',
  'fill_in_unread',
  'known_examples',
  'make',
  'size_of_data',
]

_TASKS: dict[str, type[Task]] = {'lm': TextTask, 'vit': ImageTask}


def fill_in(config: Config, trained: ModelConfig | None = None, *, resumed: bool = False) -> Config:
  """Replaces the zeros that stand for what the data asks for, such as the vocabulary's size.

  Args:
    config: from `config.resolve`.
    trained: the model that the run goes on with, or None. It has these sizes already.
    resumed: whether it is the run's own. Otherwise the task may adapt it to other data.

  Raises:
    UserError: a size that was given does not fit the data, or the data cannot be found.
  """
  return _TASKS[config.model.kind].fill_in(config, trained, resumed=resumed)


def fill_in_unread(config: Config) -> Config | None:
  """Replace the same zeros as `fill_in` without reading data; None if only the data has a size."""
  return _TASKS[config.model.kind].fill_in_unread(config)


def size_of_data(config: Config) -> str:
  """Return the size of the model that only the data has if it is 0: see `Task`."""
  return _TASKS[config.model.kind].size_of_data


def known_examples(config: Config) -> int | None:
  """Return how many examples an epoch has, if that is known without reading data."""
  return _TASKS[config.model.kind].known_examples(config)


def make(config: Config, vocabulary: dict[str, Any] | None = None) -> Task:
  """The task of a run.

  Args:
    config: with every size filled in.
    vocabulary: of the checkpoint that the run goes on from (see `Task.vocabulary`), or None.
  """
  return _TASKS[config.model.kind](config, vocabulary)


def check_vocabulary(config: Config, meta: Meta, where: str) -> None:
  """Checks, without reading data, that a run keeps what the ids of a trained model stand for.

  Args:
    config: of the run.
    meta: of the checkpoint that it goes on from.
    where: how to name that checkpoint.

  Raises:
    UserError: it does not.
  """
  _TASKS[config.model.kind].check_vocabulary(config, meta, where)


def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """The source with what the task changes of a trained model for new data: see `adapt`."""
  return _TASKS[target.kind].adapted(source, target)


def adapt(
  params: Params, target: ModelConfig, seed: int | None, *, new_head: bool = False
) -> Params:
  """Parameters with the shapes of a model from `adapted`.

  Args:
    params: of the source.
    target: that model.
    seed: of what is drawn anew; None for moments, which are zero there.
    new_head: whether to draw a head even if that of the source has the shape.
  """
  return _TASKS[target.kind].adapt(params, target, seed, new_head)
