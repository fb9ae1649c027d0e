"""Count the experts that are chosen for each token of a text, layer by layer.

A router chooses experts for the hidden state at a position, which depends on all earlier tokens.
The counts are by the token at that position.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax.inspection.usage import batches
from tokenformer_jax.inspection.weights import compiled, run_layers, watch
from tokenformer_jax.model import trunk
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.model.router import Router

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

    Each comes with its share of the expert's choices, and the expert's share of the choices for it.
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
  paths = list(trunk.layer_paths(model.repeats))
  most = sum(routers[path.stack].router.top_k for path in paths if path.stack in routers)
  run = compiled(_choices, definition, mesh)
  with jax.set_mesh(mesh):
    measured = [
      jax.device_get((batch, run(params, batch)))
      for batch in batches(rows, max(1, _CHOICES_AT_ONCE // (rows.shape[1] * most)), mesh)
    ]

  def answers(path: trunk.LayerPath) -> Answers:
    ids, experts = [], []
    for ids_BxT, choices in measured:
      chosen_BxTxK = choices[path.stack][path.run]
      counted = ids_BxT >= 0
      experts.append(chosen_BxTxK[counted].ravel())
      ids.append(np.repeat(ids_BxT[counted], chosen_BxTxK.shape[-1]))
    count = routers[path.stack].count
    return Answers(np.concatenate(ids), np.concatenate(experts), count)

  return {number: answers(path) for number, path in enumerate(paths) if path.stack in routers}


def _choices(model: LM, ids_BxT: jax.Array) -> dict[str, jax.Array]:
  """Return the experts of every token, [L, B, T, K] for each stack of layers with a router."""

  def layer(block: Any, x: jax.Array, context: Context) -> tuple[jax.Array, list[jax.Array]]:
    seen: list[jax.Array] = []
    for path in _routers(block):
      watch(block, path, lambda x, output: seen.append(output[0].experts_BxTxK))
    return block(x, context)[0], seen

  chosen = run_layers(model, ids_BxT, layer)
  return {stack: experts[0] for stack, experts in chosen.items() if experts}


def _routers(block: nnx.Module) -> dict[tuple[Any, ...], Router]:
  """Return the routers of a layer, or of stacked layers, by their paths."""
  modules = nnx.iter_modules(block)
  return {path: module for path, module in modules if isinstance(module, Router)}
