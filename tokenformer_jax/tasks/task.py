"""The interface between a run and what it learns: model, loss, batches, figures."""

import abc
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar

import jax

from tokenformer_jax import models
from tokenformer_jax.checkpoint_meta import Meta
from tokenformer_jax.compute import Compute
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.params import Params

Batch = Any  # arrays with the leading axis B, alone or in a pytree


class Task(abc.ABC):
  """What a run learns. What needs the data works after `prepare`.

  Made of a config, and of the vocabulary of the checkpoint that the run goes on from, if any.

  Attributes:
    unit: what the speed of a run is counted in, such as tokens.
    size_of_data: the size of the model that only the data knows if the config leaves it at 0.
    config: of the run, with every size filled in.
    definition: the model.
  """

  unit: ClassVar[str]
  size_of_data: ClassVar[str]

  def __init__(self, config: Config, vocabulary: dict[str, Any] | None = None):
    self.config = config
    self._trained_vocabulary = vocabulary
    self.definition = models.define(config.model, Compute.of(config))

  @staticmethod
  @abc.abstractmethod
  def fill_in(config: Config, trained: ModelConfig | None, *, resumed: bool) -> Config:
    """See `tasks.fill_in`."""

  @staticmethod
  @abc.abstractmethod
  def fill_in_unread(config: Config) -> Config | None:
    """See `tasks.fill_in_unread`."""

  @staticmethod
  def known_examples(config: Config) -> int | None:
    """See `tasks.known_examples`."""
    del config
    return None

  @staticmethod
  @abc.abstractmethod
  def check_vocabulary(config: Config, meta: Meta, where: str) -> None:
    """See `tasks.check_vocabulary`."""

  @staticmethod
  def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
    """See `tasks.adapted`. Of a model that nothing can be changed of: the source."""
    del target
    return source

  @staticmethod
  def adapt(params: Params, target: ModelConfig, seed: int | None, new_head: bool) -> Params:
    """See `tasks.adapt`."""
    del target, seed, new_head
    return params

  @abc.abstractmethod
  def abstract_batch(self) -> Batch:
    """Return the shapes and dtypes of a training batch over all devices."""

  # Functions of arrays, traced under jit.

  @abc.abstractmethod
  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What training minimises on a batch, and its figures, the `loss` to report among them.

    `key` is for what is drawn in a step; it differs from step to step.
    """

  @abc.abstractmethod
  def sums(self, params: Params, batch: Batch) -> Any:
    """Sums over what counts of a validation batch: a pytree, so that batches add up."""

  @abc.abstractmethod
  def logits(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Float32 logits [B, …, V] of a batch and the targets [B, …], as ids."""

  # The data.

  @abc.abstractmethod
  def prepare(self) -> None:
    """Opens the data, and makes ready what is made once.

    Raises:
      UserError: it cannot be read, is too little, or is another on another host.
    """

  @property
  @abc.abstractmethod
  def examples(self) -> int:
    """Rows of batches in an epoch of training."""

  @property
  @abc.abstractmethod
  def digest(self) -> str:
    """A hash by which a run that is resumed knows its training data again."""

  @property
  def other_meaning(self) -> str:
    """How the data's ids stand for something else than the checkpoint's; empty: they do not."""
    return ''

  @abc.abstractmethod
  def train_batches(
    self,
    rows: Sequence[int],
    first_step: int,
    last_step: int,
    position: Position = BEGINNING,
  ) -> Generator[Batch, None, None]:
    """This host's rows of the training batches of `first_step` … `last_step` − 1, read ahead.

    `position` says where the run begins in the order of the examples.
    """

  @abc.abstractmethod
  def validation_batches(self, rows: Sequence[int]) -> Iterator[Batch]:
    """This host's rows of the validation batches: every example once."""

  @abc.abstractmethod
  def held_out(self, vocabulary: dict[str, Any], count: int, first: int = 0) -> tuple[Batch, str]:
    """A batch that the model was not trained on, to compare models with, and what it is.

    Needs no `prepare`, and takes something else where the run's data is not on this machine.

    Args:
      vocabulary: of the checkpoint, from `vocabulary`.
      count: B.
      first: how many examples to leave out at the start.
    """

  @abc.abstractmethod
  def vocabulary(self) -> dict[str, Any]:
    """What the model's ids stand for, as JSON: a checkpoint holds it."""

  # What is said of a run.

  @property
  @abc.abstractmethod
  def units_per_step(self) -> int:
    """Of `unit`, in one step over all devices."""

  @abc.abstractmethod
  def describe_data(self) -> str:
    """The training data in a few words."""

  @abc.abstractmethod
  def train_figures(self, loss: float) -> dict[str, float]:
    """Figures of training besides those of the step, under their full names."""

  @abc.abstractmethod
  def eval_figures(self, sums: Any) -> dict[str, float]:
    """Figures of an evaluation, `loss` among them, from what `sums` gave for all batches."""

  @abc.abstractmethod
  def sample(self, params: Params) -> str:
    """What the model makes up, for the reader of the terminal; empty: nothing."""
