"""Define tasks, the parts of a run that depend on `model.kind`; `make` picks by that key.

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

# The task of each `model.kind`, and the one with a teacher, each imported on first use.
_TASKS = {
  'lm': 'tokenformer_jax.tasks.text:TextTask',
  'vit': 'tokenformer_jax.tasks.images:ImageTask',
}
_DISTILLED = 'tokenformer_jax.tasks.distilled:DistilledTextTask'


def _task_class(model: ModelConfig) -> type[Task]:
  return pkgutil.resolve_name(_TASKS[model.kind])


def fill_in(config: Config, trained: ModelConfig | None = None, *, resumed: bool = False) -> Config:
  """Replace sizes of 0, such as the vocabulary's, by the sizes that the data needs.

  `trained` is the model that the run continues from, if any; it has all sizes. Unless it is the
  run's own (`resumed`), the task may adapt it to other data.

  Raises:
    UserError: a given size does not fit the data, or the data cannot be found.
  """
  return _task_class(config.model).fill_in(config, trained, resumed=resumed)


def fill_in_unread(config: Config) -> Config | None:
  """Fill in as `fill_in` does, but without reading data; return None if a size needs the data."""
  return _task_class(config.model).fill_in_unread(config)


def data_size_key(config: Config) -> str:
  """Return the key of the size that must come from the data if it is 0: see `Task`."""
  return _task_class(config.model).data_size_key


def known_examples(config: Config) -> int | None:
  """Return the number of examples in an epoch if it is known without reading data, else None."""
  return _task_class(config.model).known_examples(config)


def make(
  config: Config,
  vocabulary: dict[str, Any] | None = None,
  teacher: ModelConfig | None = None,
) -> Task:
  """Return the task of a run; `config` has every size filled in.

  `vocabulary` is that of the checkpoint that the run continues from: see `Task.vocabulary`.
  `teacher` is the model that training learns from; None for other uses.
  """
  if teacher is not None and config.distill.weight:
    return pkgutil.resolve_name(_DISTILLED)(config, vocabulary, teacher)
  return _task_class(config.model)(config, vocabulary)


def check_vocabulary(config: Config, meta: Meta, where: str) -> None:
  """Check, without reading data, that a run keeps the meaning of a trained model's ids.

  `where` is the name of the checkpoint of `meta` in messages.

  Raises:
    UserError: the meaning differs.
  """
  _task_class(config.model).check_vocabulary(config, meta, where)


def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source model with the changes that the task makes for new data: see `adapt`."""
  return _task_class(target).adapted(source, target)


def adapt(
  params: Params, target: ModelConfig, seed: int | None, *, new_head: bool = False
) -> Params:
  """Return parameters with the shapes of `target`, a model from `adapted`.

  `seed` draws new parameters; None if `params` are moments, which become zero there. `new_head`
  draws a new head even if the source's head has the right shape.
  """
  return _task_class(target).adapt(params, target, seed, new_head)
