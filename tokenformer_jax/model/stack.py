"""Loops over stacked layers, and the policies for recomputation in the backward pass.

`params.stack` turns L layers into one module whose parameters have a leading axis. `scan_rows` runs
such modules. JAX traces and compiles one row of layers, however many there are.
"""

import functools
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

SCORES = 'pattention_scores'  # the name of the scores of parameter tokens

# The name of what the kernel of softmax attention for TPUs returns: heads, and a number for each
# query. With both the backward pass need not run attention again.
ATTENDED = 'attended'

# The values that a layer saves for its backward pass; all others are recomputed.
#   everything    inputs and outputs of every product with parameters, of norms and of attention;
#                 recomputed are only elementwise functions of the scores of Pattention
#                 (pattention.py) and of attention
#   score_inputs  the same without the scores of Pattention [B, T, N], whose inputs are saved
#   dots          outputs of projections, and of the kernel of attention for TPUs
#   attention     the layer's input, and the output of that kernel
#   full          the layer's input only
#   offload       the layer's input only, in the host's memory
_POLICIES = {
  'everything': None,
  'score_inputs': None,
  'dots': jax.checkpoint_policies.save_only_these_names(PROJECTED, ATTENDED, ROW_STATISTICS),
  'attention': jax.checkpoint_policies.save_only_these_names(ATTENDED, ROW_STATISTICS),
  'full': KEEP_STATISTICS,
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[ROW_STATISTICS],
    names_which_can_be_offloaded=[_LAYER_INPUT],
    offload_src='device',
    offload_dst='pinned_host',
  ),
}


# For each stack: the parameters of its layers, and other inputs of each layer.
Rows = Sequence[tuple[Any, Any]]
Outputs = tuple[Any, ...]  # one for each stack


def scan_rows(
  stacks: Sequence[nnx.Module],
  apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
  x: jax.Array,
  per_layer: Sequence[Any],
  *,
  remat: str,
  unrolled: bool,
  tied_runs: int = 0,
) -> tuple[jax.Array, Outputs]:
  """Apply L rows of layers one after the other: the first layer of every stack, then the second.

  Args:
    stacks: modules from `params.stack`, each with L layers.
    apply: `(layer, x, per_layer_i) -> (x, output_i)`.
    x: the input of the first layer.
    per_layer: for each stack a pytree with a leading axis L, or None.
    remat: the name of a policy above, for the backward pass of each layer.
    unrolled: whether each row has code of its own. A loop copies saved values into stacked arrays
      and back, and its program is as long as one row.
    tied_runs: if the stacks have one layer each, how often to apply this row, which gets the sum of
      the gradients of its runs; 0: every row once.

  Returns:
    The last x, and for each stack the outputs of its layers stacked along a leading axis.
  """
  split = [nnx.split(layers) for layers in stacks]
  graphs = [graphdef for graphdef, _ in split]
  states = [state for _, state in split]
  # The loop takes the rows of untied layers apart. A tied row is a constant of the loop.
  tied = [jax.tree.map(lambda array: array[0], state) for state in states] if tied_runs else None
  rows = list(zip([None] * len(states) if tied else states, per_layer, strict=True))

  def apply_row(x: jax.Array, row: Rows) -> tuple[jax.Array, Outputs]:
    outputs = []
    for graphdef, one, (state, extra) in zip(graphs, tied or row, row, strict=True):
      run = functools.partial(_apply_layer, apply, graphdef)
      if (policy := _POLICIES[remat]) is not None:
        # In a loop XLA cannot merge the recomputation with the forward pass: no barrier is needed.
        run = jax.checkpoint(run, prevent_cse=unrolled, policy=policy)
      x, output = run(x, one if tied else state, extra)
      outputs.append(output)
    return x, tuple(outputs)

  return jax.lax.scan(apply_row, x, rows, length=tied_runs or None, unroll=unrolled)


def _apply_layer(
  apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
  graphdef: nnx.GraphDef,
  x: jax.Array,
  state: Any,
  extra: Any,
) -> tuple[jax.Array, Any]:
  return apply(nnx.merge(graphdef, state), checkpoint_name(x, _LAYER_INPUT), extra)
