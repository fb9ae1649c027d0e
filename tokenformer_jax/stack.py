"""Running stacked layers one after the other, and what the backward pass recomputes.

`params.stack` makes L layers one module whose parameters have a leading axis; `scan` runs it. One
layer is traced and compiled however many there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

_LAYER_INPUT = 'layer_input'

# The name of a norm's sums over a row, a number or two. They are always kept, so that nothing that
# is computed again waits for them. Not what is made of them: to differentiate it takes them, too.
ROW_STATISTICS = 'row_statistics'
KEEP_STATISTICS = jax.checkpoint_policies.save_only_these_names(ROW_STATISTICS)

# The name of what a projection makes, a Pattention or a matrix product with parameters.
PROJECTED = 'projected'

# What a layer keeps for its backward pass; everything else is computed again.
#   everything    what goes into and out of every product with parameters, norms and attention:
#                 only what follows from scores element by element is computed again, of Pattention
#                 (pattention.py) and of attention
#   score_inputs  the same without the scores of Pattention [B, T, N]: their inputs are there
#   dots          what projections make
#   full          nothing but the layer's input
#   offload       the same, which waits in the host's memory
_POLICIES = {
  'everything': None,
  'score_inputs': None,
  'dots': jax.checkpoint_policies.save_only_these_names(PROJECTED, ROW_STATISTICS),
  'full': KEEP_STATISTICS,
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[ROW_STATISTICS],
    names_which_can_be_offloaded=[_LAYER_INPUT],
    offload_src='device',
    offload_dst='pinned_host',
  ),
}


def scan(
  layers: nnx.Module,
  apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
  x: jax.Array,
  per_layer: Any = None,
  *,
  remat: str = 'score_inputs',
  loop: bool = True,
) -> tuple[jax.Array, Any]:
  """Apply L stacked layers one after the other.

  Args:
    layers: a module from `params.stack`.
    apply: `(layer, x, per_layer_i) -> (x, output_i)`.
    x: what goes from layer to layer.
    per_layer: a pytree with a leading axis L, or None.
    remat: what is kept for the backward pass, a name above.
    loop: one program for a layer, run L times, which copies what layers keep into stacked arrays
      and, backward, out of them. Without, a program that is L times as long copies nothing.

  Returns:
    The last x, and the outputs of all layers stacked along a leading axis.
  """
  x, (outputs,) = scan_rows([layers], apply, x, [per_layer], remat=remat, loop=loop)
  return x, outputs


def scan_rows(
  stacks: Sequence[nnx.Module],
  apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
  x: jax.Array,
  per_layer: Sequence[Any],
  *,
  remat: str,
  loop: bool,
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Apply L rows of layers one after the other: the first layer of every stack, then the second.

  Args:
    stacks: modules from `params.stack`, with as many layers each.
    apply: as for `scan`.
    x: what goes from layer to layer.
    per_layer: for each stack what `scan` takes.
    remat: as for `scan`; every layer keeps its own.
    loop: as for `scan`, of the program for a row.

  Returns:
    The last x, and for each stack the outputs of its layers stacked along a leading axis.
  """
  parts = [nnx.split(layers) for layers in stacks]

  def kept(graphdef: nnx.GraphDef) -> Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]:
    def run(x: jax.Array, state: Any, extra: Any) -> tuple[jax.Array, Any]:
      return apply(nnx.merge(graphdef, state), checkpoint_name(x, _LAYER_INPUT), extra)

    if (policy := _POLICIES[remat]) is None:
      return run
    # In a loop there is nothing that XLA could merge with what is computed again.
    return jax.checkpoint(run, prevent_cse=not loop, policy=policy)

  runs = [kept(graphdef) for graphdef, _ in parts]

  def body(x: jax.Array, row: Sequence[tuple[Any, Any]]) -> tuple[jax.Array, tuple[Any, ...]]:
    outputs = []
    for run, (state, extra) in zip(runs, row, strict=True):
      x, output = run(x, state, extra)
      outputs.append(output)
    return x, tuple(outputs)

  rows = [(state, extra) for (_, state), extra in zip(parts, per_layer, strict=True)]
  return jax.lax.scan(body, x, rows, unroll=not loop)
