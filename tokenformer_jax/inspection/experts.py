"""Count the experts that are chosen for each token of a text, layer by layer.

A router chooses experts for the hidden state at a position, which depends on all earlier tokens.
The counts are by the token at that position.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax.inspection.usage import batches
from tokenformer_jax.inspection.weights import run_layers
from tokenformer_jax.model import trunk
from tokenformer_jax.model.layer import Aux, Context, Layer
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.model.router import Choice, Router
from tokenformer_jax.parallel import sharding

_CHOICES_AT_ONCE = 2**22  # on a device, over all layers


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
  """The M choices of experts that a layer made for a text."""

  ids: np.ndarray  # [M], the token id of each choice
  experts: np.ndarray  # [M], the expert of each choice
  count: int  # E, the number of experts

  @property
  def load(self) -> np.ndarray:
    """Return each expert's share of all choices, [E]."""
    return np.bincount(self.experts, minlength=self.count) / max(1, len(self.experts))

  def tokens(self, expert: int, most: int) -> list[tuple[int, float, float]]:
    """Return the `most` token ids that an expert gets most often.

    Each comes with its part of the expert's choices, and the expert's part of the choices for it.
    """
    ids, times = np.unique(self.ids[self.experts == expert], return_counts=True)
    first = np.argsort(-times, kind='stable')[:most]
    return [
      (int(ids[i]), float(times[i] / times.sum()), float(times[i] / np.sum(self.ids == ids[i])))
      for i in first
    ]


def measure(
  definition: Definition, params: Params, rows: np.ndarray, mesh: Mesh
) -> dict[int, Answers]:
  """Return the experts that each layer with a router chooses for a text, by layer from 0 on.

  The definition comes from `define_lm`, the parameters may be anywhere on the mesh, and `rows` are
  token ids [R, T]; −1 is padding at the end of a row.
  """
  model = definition.bind(definition.abstract)
  routers = {
    stack: router
    for stacks in trunk.named_stacks(model.blocks, model.repeats)
    for stack, layers in stacks.items()
    for router in _routers(layers).values()
  }
  if not routers:
    return {}
  places = list(trunk.layer_paths(model.repeats))
  most = sum(routers[place.stack].router.top_k for place in places if place.stack in routers)
  run = _compiled(definition, mesh)
  parts = []
  with jax.set_mesh(mesh):
    for batch in batches(rows, max(1, _CHOICES_AT_ONCE // (rows.shape[1] * most)), mesh):
      ids = np.asarray(jax.device_get(batch))
      parts.append((ids, jax.device_get(run(params, batch))))

  def answers(place: trunk.LayerPath) -> Answers:
    ids, experts = [], []
    for ids_BxT, choices in parts:
      chosen_BxTxK = choices[place.stack][place.row]
      counted = ids_BxT >= 0
      experts.append(chosen_BxTxK[counted].ravel())
      ids.append(np.repeat(ids_BxT[counted], chosen_BxTxK.shape[-1]))
    count = routers[place.stack].count
    return Answers(np.concatenate(ids), np.concatenate(experts), count)

  return {number: answers(place) for number, place in enumerate(places) if place.stack in routers}


@functools.lru_cache(maxsize=4)
def _compiled(definition: Definition, mesh: Mesh) -> Callable[..., dict[str, jax.Array]]:
  """Return jitted `_choices` for calls in `jax.set_mesh(mesh)`; every host gets the result."""
  return jax.jit(
    lambda params, ids: _choices(definition.bind(params), ids),
    out_shardings=sharding.replicated(mesh),
  )


def _choices(model: LM, ids_BxT: jax.Array) -> dict[str, jax.Array]:
  """Return the experts of every token, [L, B, T, K] for each stack of layers with a router."""
  context = Context.from_ids(ids_BxT)

  def layer(block: Layer, x: jax.Array, _: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    seen: list[jax.Array] = []
    modules = dict(nnx.iter_modules(block))
    for path, router in _routers(block).items():
      setattr(modules[path[:-1]], path[-1], _Watched(router, seen.append))
    return block(x, context)[0], seen

  _, found = run_layers(model, layer, model.embed(jnp.maximum(ids_BxT, 0)))
  return {stack: chosen[0] for stack, chosen in found.items() if chosen}


def _routers(block: nnx.Module) -> dict[tuple[Any, ...], Router]:
  """Return the routers of a layer, or of stacked layers, by their paths."""
  modules = nnx.iter_modules(block)
  return {path: module for path, module in modules if isinstance(module, Router)}


class _Watched:
  """A router that passes its choice to `see`."""

  def __init__(self, router: Router, see: Callable[[jax.Array], None]):
    self._router, self._see, self.count = router, see, router.count

  def __call__(self, *arguments: Any) -> tuple[Choice, Aux]:
    choice, aux = self._router(*arguments)
    self._see(choice.experts_BxTxK)
    return choice, aux
