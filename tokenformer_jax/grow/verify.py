"""Compare the outputs of two models on the same held-out batch."""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.tasks import Batch, Task

# The largest difference, relative to the largest logit, that another order of float32 sums causes
# over many layers.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Outputs:
  """The outputs of a model on a batch: float32 logits [B, …, V] and the mean loss per target."""

  logits: jax.Array
  loss: jax.Array


def exact_task(config: Config, model: ModelConfig) -> Task:
  """Return the task of a run with this model, computed in float32 and without special kernels."""
  train = dataclasses.replace(config.train, attention='xla', remat='score_inputs')
  return tasks.make(dataclasses.replace(config, model=model, train=train, dtype='float32'))


def loss(task: Task, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Return the mean cross-entropy of a batch in nats per target, and the logits."""
  logits, targets = task.logits(params, batch)
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets)), logits


def program(task: Task, batch: Batch, mesh: Mesh) -> Callable[[Params], Outputs]:
  """Return the function from parameters to outputs on a batch; compile it in the background."""
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  shardings = sharding.tree_shardings(mesh, task.definition.axes)
  abstract = sharding.with_even_shardings(task.definition.abstract, shardings)

  def compile_() -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    run = jax.jit(lambda params, batch: loss(task, params, batch))
    with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
      return run.lower(abstract, batch).compile()

  pool = concurrent.futures.ThreadPoolExecutor(1)
  compiled = pool.submit(compile_)
  pool.shutdown(wait=False)

  def run(params: Params) -> Outputs:
    mean, logits = compiled.result()(params, batch)
    return Outputs(logits, mean)

  return run


def largest_difference(before: Outputs, after: Outputs) -> tuple[float, float]:
  """Return the largest difference of two logits, and the bound on it for equal functions."""
  different, size = jax.jit(
    lambda a, b: (jnp.max(jnp.abs(a - b)), jnp.maximum(1.0, jnp.max(jnp.abs(a))))
  )(before.logits, after.logits)
  return float(different), TOLERANCE * float(size)


class Comparison:
  """Compares the outputs of the models before and after a change.

  Args:
    config: of the run.
    models: the two models, whose programs compile in the background.
    batch: the examples.
    name: of the examples.
    mesh: of the parameters.
  """

  def __init__(
    self,
    config: Config,
    models: tuple[ModelConfig, ModelConfig],
    batch: Batch,
    name: str,
    mesh: Mesh,
  ):
    programs = {model: program(exact_task(config, model), batch, mesh) for model in {*models}}
    self._programs = [programs[model] for model in models]
    self._name, self._outputs = name, list[Outputs]()

  def see(self, params: Params) -> None:
    """Compute the outputs of the model before; in the second call those of the model after."""
    self._outputs.append(self._programs[len(self._outputs)](params))

  def report(self, *, exact: bool) -> None:
    """Report how far the outputs differ; refuse those that are not finite, or not `exact`."""
    before, after = self._outputs
    different, allowed = largest_difference(before, after)
    messages.say(
      f'{self._name}: the logits differ by at most {different:.2g}, the loss is '
      f'{before.loss:.6f} before and {after.loss:.6f} after'
    )
    if not math.isfinite(different):
      raise UserError(
        'the logits before or after are not finite, so that the result could not be trained; '
        'nothing was written'
      )
    if exact and different > allowed:
      raise UserError(
        f'the grown model computes something else: its logits differ by {different:.2g}, and '
        f'{allowed:.2g} is what float32 explains; nothing was written'
      )
