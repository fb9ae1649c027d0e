"""The interface between a run and its learning task: model, loss, batches, figures."""

import abc
import copy
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import models
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Aux, Counts, layer_means
from tokenformer_jax.model.params import Definition, Params

Batch = Any  # arrays with the leading axis B, alone or in a pytree


Figures = dict[str, Any]  # numbers by name; those of `layers` are per layer


def with_aux(
  objective: jax.Array, loss: jax.Array, aux: Aux, counts: Counts
) -> tuple[jax.Array, Figures]:
  """Add the layers' auxiliary loss to the objective; return it with the figures of the batch.

  `loss` is the part of the objective that is reported as `loss`. The results of microbatches add
  up to those of the whole batch, whose counts are given: see `reported`.
  """
  aux_loss, layers = aux.divided(counts)
  figures = {'loss': loss, 'layers': layers}
  if aux_loss is None:
    return objective, figures
  return objective + aux_loss, {**figures, 'aux_loss': aux_loss}


def reported(figures: Figures) -> dict[str, Any]:
  """Return the figures of a whole batch for the log, those of layers as means over layers."""
  rest = {name: value for name, value in figures.items() if name != 'layers'}
  return {**rest, **layer_means(figures['layers'])}


def layer_keys(model: ModelConfig, key: jax.Array | None) -> jax.Array | None:
  """Return a key for each layer [L], or None if no layer draws random numbers.

  `key` is that of a training step; None: an evaluation.
  """
  if key is None or not config_lib.draws(model):
    return None
  return jax.random.split(key, model.depth)


def check_enough(count: int, first: int, known: int, what: str) -> None:
  """Check that there are `count` held-out examples after the first ones."""
  if first + count > known:
    raise UserError(
      f'held_out: count is {count} and first is {first}, and the held-out data has {known:,} '
      f'{what}; take fewer'
    )


class EvalSums(NamedTuple):
  """Sums over the counted examples or targets of validation batches. Sums of batches add up."""

  task: Any  # the sums that the task defines
  aux: Aux  # those of the layers
  counts: Counts

  def layer_figures(self) -> dict[str, Any]:
    """Return the means of the layers' figures over all batches, and their loss `aux_loss`."""
    loss, figures = self.aux.divided(self.counts)
    return layer_means(figures) | ({} if loss is None else {'aux_loss': loss})


class Task(abc.ABC):
  """The learning task of a run. Methods that need the data work after `prepare`.

  The constructor takes a config and, if the run starts from a checkpoint, its vocabulary, and its
  tokenizer if that is made already.

  Attributes:
    config: the config of the run, with every size filled in.
    definition: the model.
    teacher: the model that the run learns from besides its targets, or None. With one, `loss` has
      its parameters as another argument.
  """

  teacher: Definition | None = None

  def __init__(
    self,
    config: Config,
    vocabulary: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
  ):
    self.config = config
    self._trained_vocabulary, self._trained_tokenizer = vocabulary, tokenizer
    self.definition = models.define(config.model, Execution.from_config(config))

  @abc.abstractmethod
  def abstract_batch(self) -> Batch:
    """Return the shapes and dtypes of a training batch over all devices."""

  # Functions of arrays, traced under jit.

  @abc.abstractmethod
  def loss(
    self,
    params: Params,
    batch: Batch,
    key: jax.Array,
    *teacher: Params,
    counts: Counts | None = None,
  ) -> tuple[jax.Array, Figures]:
    """Return the objective of a batch and its figures, which include the reported `loss`.

    Both include the auxiliary loss and figures of the layers (see `with_aux`). `key` seeds the
    random draws of the step and differs from step to step. `counts` are the sums of `counts` over
    all microbatches; None: the batch is whole.
    """

  @abc.abstractmethod
  def counts(self, batch: Batch) -> Counts:
    """Return the divisors of the sums of a training batch, int32."""

  @abc.abstractmethod
  def sums(self, params: Params, batch: Batch, *teacher: Params) -> EvalSums:
    """Return the sums over a validation batch; `teacher` as for `loss`."""

  @abc.abstractmethod
  def logits(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the float32 logits [B, …, V] of a batch, and its target ids [B, …]."""

  # The data.

  @abc.abstractmethod
  def prepare(self) -> None:
    """Open the data, and build files that a run prepares once, such as a token store."""

  @property
  @abc.abstractmethod
  def examples(self) -> int:
    """Return the number of training examples in an epoch; one example is one row of a batch."""

  @property
  @abc.abstractmethod
  def digests(self) -> tuple[str, ...]:
    """Return the hashes that identify the training data when a run resumes; the first is stored.

    Later ones are those of earlier versions.
    """

  @property
  def other_meaning(self) -> str:
    """Return the difference in the ids' meaning between data and checkpoint; '' for none."""
    return ''

  def at_stage(self, data: DataConfig) -> Self:
    """Return the task with training batches of the sizes of a stage: see `config.at_stage`."""
    if data == self.config.data:
      return self
    stage = copy.copy(self)
    stage.config = dataclasses.replace(self.config, data=data)
    return stage

  def with_train(self, train: TrainConfig) -> Self:
    """Return the task with other values of `train` that say how its model is computed."""
    return self._with_config(dataclasses.replace(self.config, train=train))

  def with_model(self, model: ModelConfig) -> Self:
    """Return the task with another model that has the same inputs and outputs."""
    return self._with_config(dataclasses.replace(self.config, model=model))

  def _with_config(self, config: Config) -> Self:
    task = copy.copy(self)
    task.config = config
    task.definition = models.define(config.model, Execution.from_config(config))
    return task

  @abc.abstractmethod
  def train_batches(
    self,
    rows: Sequence[int],
    first_step: int,
    last_step: int,
    position: Position = BEGINNING,
  ) -> Generator[Batch, None, None]:
    """Return this host's rows of the training batches `first_step` … `last_step` − 1, read ahead.

    `position` is the start of the run in the order of the examples.
    """

  @abc.abstractmethod
  def validation_parts(self, rows: Sequence[int]) -> dict[str, Iterator[Batch]]:
    """Return this host's rows of the validation batches of each part with figures of its own.

    Every example comes once. The only part of a split without parts is ''.
    """

  @abc.abstractmethod
  def held_out(
    self, vocabulary: dict[str, Any], count: int, first: int = 0, *, repeat: bool = True
  ) -> tuple[Batch, str]:
    """Return a batch that the model was not trained on, and its description, for comparing models.

    The method works without `prepare`. If this machine does not have the run's data, it takes other
    data. The batch has `count` examples after the `first` ones; with `repeat` it begins again where
    there are fewer.
    """

  @abc.abstractmethod
  def vocabulary(self) -> dict[str, Any]:
    """Return the meaning of the model's ids as JSON, for the checkpoint."""

  # Reports on a run.

  @abc.abstractmethod
  def describe_data(self) -> str:
    """Return a short description of the training data."""

  @abc.abstractmethod
  def train_figures(self, loss: float) -> dict[str, float]:
    """Return the training figures that the step does not compute, by their full names."""

  @abc.abstractmethod
  def eval_figures(self, sums: EvalSums) -> dict[str, float]:
    """Return the figures of an evaluation, including `loss`, from the total of `sums`."""

  def parts_figures(self, sums: Mapping[str, EvalSums]) -> dict[str, float]:
    """Return the figures of an evaluation from the total of `sums` of each part, by its name.

    The figures of a part NAME are called NAME/FIGURE.
    """
    return self.eval_figures(sums[''])

  def data_figures(self, step: int, position: Position) -> dict[str, float]:
    """Return the figures of the data after a step, by their full names: see `train_batches`."""
    del step, position
    return {}

  def sample(self, params: Params) -> str:
    """Return a sample of the model's output for the terminal, or an empty string."""
    del params
    return ''
