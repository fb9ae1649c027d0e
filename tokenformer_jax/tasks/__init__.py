"""Define tasks, the parts of a run that depend on `model.kind`, by which `make` picks.

task.py       the interface for the loop, the step and growth
text.py       language models on text
distilled.py  language models on text, with a teacher
preference.py language models on pairs of answers
images.py     vision transformers on images
"""

from typing import Any

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.tasks.distilled import DistilledTextTask
from tokenformer_jax.tasks.images import ImageTask
from tokenformer_jax.tasks.preference import PreferenceTask
from tokenformer_jax.tasks.task import Batch, Task
from tokenformer_jax.tasks.text import TextTask

_TASKS = {'lm': TextTask, 'vit': ImageTask}  # of each `model.kind`


def make(
  config: Config,
  vocabulary: dict[str, Any] | None = None,
  teacher: ModelConfig | None = None,
  before: ModelConfig | None = None,
  tokenizer: Tokenizer | None = None,
) -> Task:
  """Return the task of a run; `config` has every size filled in.

  `vocabulary` is that of the checkpoint that the run continues from: see `Task.vocabulary`.
  `teacher` is the model that training learns from; None for other uses. `before` is the model
  before its last growth, if it can be a reference: see `PreferenceTask`. `tokenizer` is
  that of `vocabulary`, if it is made already.
  """
  if config.data.has_pairs:
    return PreferenceTask(config, vocabulary, teacher, before, tokenizer)
  if teacher is not None and config.distill.weight:
    return DistilledTextTask(config, vocabulary, teacher, tokenizer)
  return _TASKS[config.model.kind](config, vocabulary, tokenizer)
