"""Tasks: what of a run depends on its kind of model. `make` picks by `config.model.kind`.

task.py    the interface that the loop, the step and growth work with
text.py    language models on text
images.py  vision transformers on images
"""

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.params import Params
from tokenformer_jax.tasks.images import ImageTask
from tokenformer_jax.tasks.task import Batch, Task
from tokenformer_jax.tasks.text import TextTask

__all__ = ['Batch', 'Task', 'adapt', 'adapted', 'fill_in', 'make']

_TASKS: dict[str, type[Task]] = {'lm': TextTask, 'vit': ImageTask}


def fill_in(config: Config) -> Config:
  """Replaces the zeros that stand for what the data asks for, such as the vocabulary's size.

  Raises:
    UserError: a size that was given does not fit the data, or the data cannot be found.
  """
  return _TASKS[config.model.kind].fill_in(config)


def make(config: Config) -> Task:
  """The task of a run; `config` has every size filled in."""
  return _TASKS[config.model.kind](config)


def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """The source with what the task changes of a trained model for new data: see `adapt`."""
  return _TASKS[target.kind].adapted(source, target)


def adapt(params: Params, target: ModelConfig, seed: int | None) -> Params:
  """Parameters with the shapes of a model from `adapted`.

  Args:
    params: of the source.
    target: that model.
    seed: of what is drawn anew; None for moments, which are zero there.
  """
  return _TASKS[target.kind].adapt(params, target, seed)
