"""Running layers one after the other, and what the backward pass recomputes.

`params.stack` makes L layers one module whose parameters have a leading axis; `scan` runs it. One
layer is traced and compiled however many there are. For decoding, which reads every parameter to
write one token, `unroll` runs them from a list: nothing is copied out of stacked arrays then.
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

# What a layer keeps for its backward pass, besides; everything else is computed again. Scores of
# Pattention [B, T, N] are never kept, nor what is made of them (pattention.py).
#   none     all the rest: what goes in and out of projections, norms and attention
#   dots     what projections make
#   full     nothing but the layer's input
#   offload  the same, which waits in the host's memory
_POLICIES = {
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
  remat: str = 'none',
  loop: bool = True,
) -> tuple[jax.Array, Any]:
  """Applies L stacked layers one after the other.

  Args:
    layers: a module from `params.stack`.
    apply: `(layer, x, per_layer_i) -> (x, output_i)`.
    x: what goes from layer to layer.
    per_layer: a pytree with a leading axis L, such as a key-value cache, or None.
    remat: `none`, `dots`, `full` or `offload`.
    loop: one program for a layer, run L times, which copies what layers keep into stacked arrays
      and, backward, out of them. Without, a program that is L times as long copies nothing.

  Returns:
    The last x, and the outputs of all layers stacked along a leading axis.
  """
  graphdef, state = nnx.split(layers)

  def body(x, layer_inputs):
    layer_state, extra = layer_inputs
    x = checkpoint_name(x, _LAYER_INPUT)
    return apply(nnx.merge(graphdef, layer_state), x, extra)

  if remat in _POLICIES:
    # In a loop there is nothing that XLA could merge with what is computed again.
    body = jax.checkpoint(body, prevent_cse=not loop, policy=_POLICIES[remat])
  return jax.lax.scan(body, x, (state, per_layer), unroll=not loop)


def unroll(
  layers: nnx.List,
  apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
  x: jax.Array,
  per_layer: Sequence[Any] | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Like `scan`, for a list of layers, what belongs to a layer, and the outputs, in sequences."""
  outputs = []
  for i, layer in enumerate(layers):
    x, output = apply(layer, x, None if per_layer is None else per_layer[i])
    outputs.append(output)
  return x, tuple(outputs)
