"""Loops over stacked layers, and the policies for recomputation in the backward pass.

`params.stack` turns L layers into one module whose parameters have a leading axis. `scan_rows` runs
such modules. JAX traces and compiles one row of layers, however many there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

_LAYER_INPUT = 'layer_input'

# The name of a norm's sums over a row: one or two numbers per row. Every policy saves them, so that
# no recomputation waits for them. Save the sums, not values derived from them: the derivative needs
# the sums.
ROW_STATISTICS = 'row_statistics'
KEEP_STATISTICS = jax.checkpoint_policies.save_only_these_names(ROW_STATISTICS)

# The name of the output of a projection: a Pattention or a matrix product with parameters.
PROJECTED = 'projected'

# The values that a layer saves for its backward pass; all others are recomputed.
#   everything    inputs and outputs of every product with parameters, of norms and of attention;
#                 recomputed are only elementwise functions of the scores of Pattention
#                 (pattention.py) and of attention
#   score_inputs  the same without the scores of Pattention [B, T, N], whose inputs are saved
#   dots          outputs of projections
#   full          the layer's input only
#   offload       the layer's input only, in the host's memory
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
    stacks: modules from `params.stack`, each with L layers.
    apply: `(layer, x, per_layer_i) -> (x, output_i)`.
    x: the input of the first layer.
    per_layer: for each stack a pytree with a leading axis L, or None.
    remat: the name of a policy above, for the backward pass of each layer.
    loop: whether to compile one row and run it L times, which copies saved values into stacked
      arrays and back. Otherwise the program is L times as long and copies nothing.

  Returns:
    The last x, and for each stack the outputs of its layers stacked along a leading axis.
  """
  parts = [nnx.split(layers) for layers in stacks]

  def kept(graphdef: nnx.GraphDef) -> Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]:
    def run(x: jax.Array, state: Any, extra: Any) -> tuple[jax.Array, Any]:
      return apply(nnx.merge(graphdef, state), checkpoint_name(x, _LAYER_INPUT), extra)

    if (policy := _POLICIES[remat]) is None:
      return run
    # In a loop XLA cannot merge the recomputation with the forward pass: no barrier is needed.
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
