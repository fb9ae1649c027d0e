r"""Measure the cost of Pattention's norm and GELU in a training step, by the compiler's cycles.

  python benchmarks/norm_cost.py                    plan the missing cells and print all
  python benchmarks/norm_cost.py --only=1_5b --on=v5p
  python benchmarks/norm_cost.py --report           print the tables of the kept cells

The step of the config is compared with the same step

  no norm     with GELU(A) instead of GELU(τ A / ‖A‖)
  KᵀK         with ‖A‖² = x (KᵀK) xᵀ instead of the sum of squares of the scores A = x Kᵀ
  tanh        with the tanh approximation of GELU

at n = d (1_5b) and at about n = 11 d (the grown 1_4b, its counts multiples of 128). Times are the
compiler's cycles and kernels, without collectives. Each of 16 programs takes minutes. The command
needs `pip install -e ".[tpu]"`, but no TPU. Cells are kept in `--out`, as in pods.py.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import cells
import jax
import jax.numpy as jnp
from absl import flags
from cells import MODELS, Figures, Model, Row
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import plan as command
from tokenformer_jax.config import ScoreConfig, TokenGroup
from tokenformer_jax.model import pattention
from tokenformer_jax.model.groups import OneGroup
from tokenformer_jax.model.products import product, project, split_heads
from tokenformer_jax.model.stack import ROW_STATISTICS
from tokenformer_jax.plan import layout_dump, topology

GROWN = {'mixer.qkv': 8704, 'mixer.proj': 8704, 'ffn': 34816}  # parameter tokens
SHAPES = {
  'n = d, lm_pile:1_5b': MODELS['lm_pile:1_5b'],
  'n = 11 d, lm_openwebtext:1_4b': Model(
    'lm_openwebtext.py:1_4b',
    1024,
    tuple(f'--config.model.layer.{part}.tokens={count}' for part, count in GROWN.items()),
  ),
}
TOPOLOGIES = ('v5p:4x4x4', 'v5e:4x4')
AS_IT_IS, TANH = 'as it is', 'tanh'
HEAD = ('', 'ms a step', 'ratio')


def without_norm(scores_BxTxN: jax.Array, score: ScoreConfig, groups: OneGroup) -> jax.Array:
  """Replace `pattention.parameter_weights` by the GELU alone."""
  del groups
  return pattention.activate(scores_BxTxN.astype(jnp.float32), score.gelu).astype(
    scores_BxTxN.dtype
  )


def by_products_of_keys(
  x: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  out_heads: tuple[int, int] | None,
  keep_scores: bool,
  prevent_cse: bool,
  groups: Sequence[TokenGroup],
) -> jax.Array:
  """Replace `pattention.pattention`: compute norms from products of keys, D² instead of N terms."""
  (group,) = groups

  def apply(x: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    keys_NxI = keys.astype(x.dtype)
    if x.ndim == 4:
      keys_NxI = split_heads(keys_NxI, 1, x.shape[2:], pattention.TOKEN_AXES)
    x_BxTxI, keys_NxI = x.reshape(*x.shape[:2], -1), keys_NxI.reshape(len(keys), -1)
    gram_IxI = jnp.einsum('NI,NJ->IJ', keys_NxI, keys_NxI, preferred_element_type=jnp.float32)
    turned_BxTxI = product('BTI,IO->BTO', x_BxTxI, gram_IxI, preferred_element_type=jnp.float32)
    square = jnp.sum(turned_BxTxI * x_BxTxI.astype(jnp.float32), axis=-1, keepdims=True)
    square = checkpoint_name(square + pattention.EPSILON, ROW_STATISTICS)
    inverse = jax.lax.rsqrt(square) * jnp.sqrt(jnp.float32(group.reference))
    scores = checkpoint_name(pattention.scores(x, keys), pattention.SCORES)
    weights = pattention.activate(scores.astype(jnp.float32) * inverse, group.score.gelu)
    weights = weights.astype(x.dtype)
    return project(weights, values, pattention.TOKEN_AXES, contract=0, out_heads=out_heads)

  return pattention.keep_for_backward(apply, keep_scores, prevent_cse)(x, keys, values)


REPLACED = {  # variant → function of model/pattention.py and its replacement
  'no norm': ('parameter_weights', without_norm),
  'KᵀK': ('pattention', by_products_of_keys),
}


def plan_with(variant: str) -> None:
  """Run the planner's command, with its flags, on a changed Pattention."""

  @functools.wraps(command.main)
  def main(**given: Any) -> None:
    name, function = REPLACED[variant]
    with (
      mock.patch.object(pattention, name, side_effect=function) as counted,
      # This process has one program, and another would have Pattention as it is.
      mock.patch.object(
        layout_dump, 'run_alone', lambda function, *arguments: function(*arguments)
      ),
    ):
      command.main(**given)
    if not counted.called:
      sys.exit(f'Pattention does not call {name}: nothing was replaced')

  flags.DEFINE_enum('plan_with', variant, list(REPLACED), 'The variant.')
  cli.command(main, on_all_hosts=False)


def plan_cells(args, others: list[str], shape: str, on: str) -> dict[str, Figures]:
  """Return the figures of every planned variant."""
  model = SHAPES[shape]
  by_variant = {}
  for variant in (AS_IT_IS, *REPLACED, TANH):
    program = ('benchmarks/norm_cost.py', f'--plan_with={variant}')
    gelu = 'tanh' if variant == TANH else 'exact'
    by_variant[variant] = cells.planned(
      f'{model.file}-{on}-{variant.replace(" ", "_")}',
      model.on(
        on,
        model.rows(args.tokens_per_chip) * topology.parse(on).chips,
        '--config.train.remat=full',
        *(f'--config.model.layer.{part}.score.gelu={gelu}' for part in GROWN),
        *others,
      ),
      args.out,
      report=args.report,
      command=program if variant in REPLACED else cells.PLAN,
    )
  return {variant: figures for variant, figures in by_variant.items() if figures}


def rows(by_variant: dict[str, Figures]) -> list[Row]:
  """Return a row for each variant, with the time of the unchanged step over the variant's."""
  lines, whole = [], by_variant.get(AS_IT_IS, {}).get('compute_seconds')
  for variant, figures in by_variant.items():
    if 'error' in figures:
      lines.append((variant, figures['error'], ''))
      continue
    seconds = figures['compute_seconds']
    ratio = f'{whole / seconds:.3f}' if whole else ''
    lines.append((variant, f'{seconds * 1e3:,.2f}', ratio))
  return lines


def main() -> None:
  """Plan the cells and print a table for each shape and topology."""
  parser = cells.parser(__doc__, 'runs/norm_cost')
  args, others = parser.parse_known_args()
  lines: list[Row] = []
  if '--quick' in others:
    parser.error('--quick gives no cycles, which this benchmark compares; leave it out')
  for shape in SHAPES:
    for on in TOPOLOGIES:
      if args.only not in shape or args.on not in on:
        continue
      by_variant = plan_cells(args, others, shape, on)
      if by_variant:
        print(
          f'{shape} on {on}, {args.tokens_per_chip:,} tokens a chip; '
          f'{cells.versions(by_variant.values())}. Ratio: as it is over this\n'
        )
        print(cells.table(HEAD, rows(by_variant)) + '\n')
        lines += [(shape, on, *row) for row in rows(by_variant)]
  cells.write_csv(args.csv, ('shape', 'topology', 'step', *HEAD[1:]), lines)


if __name__ == '__main__':
  if len(sys.argv) > 1 and sys.argv[1].startswith('--plan_with='):
    plan_with(sys.argv[1].partition('=')[2])
  else:
    main()
