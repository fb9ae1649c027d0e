r"""What a layer's chips exchange, as it should be and as it is in the compiled program.

  python benchmarks/collectives.py                                 1_5b on v5e:4x4
  python benchmarks/collectives.py --model=lm_openwebtext:1_4b --topology=v5p:2x2x1 --tokens=1,2,4

For meshes that split by `fsdp` alone, by `tokens` alone and by both. What is found is the
difference between two depths over the layers that make it, so that neither the head nor the
embedding is in it; with recomputation `full`. A collective of several arrays, which the compiler
makes of several, counts once; and where it writes a whole sum in the place of one that is
scattered, that is an all-reduce of twice the bytes.

Lays out two programs for each mesh, in seconds; needs `pip install -e ".[tpu]"`, no TPU. Cells are
kept in `--out`, as in pods.py.
"""

import dataclasses
import sys
from typing import Any

import cells
from cells import MODELS, Figures, Row

from tokenformer_jax.config import ModelConfig, from_dict
from tokenformer_jax.plan import topology

HEAD = (
  'mesh', 'along', 'collective', 'expected', 'number', 'found', 'MB in, expected', 'MB in, found'
)  # fmt: skip
ACTIVATION, NORM = 2, 4  # bytes of bfloat16 and float32


@dataclasses.dataclass(frozen=True)
class Expected:
  """Collectives of one layer in a step.

  Attributes:
    axis: of the mesh.
    kind: as the planner names it.
    what: they are for.
    number: how many.
    received: bytes that a device receives in all of them.
  """

  axis: str
  kind: str
  what: str
  number: int
  received: float


def expected(model: dict[str, Any], fsdp: int, tokens: int, positions: int) -> list[Expected]:
  """What a layer has to exchange in a step, recomputation `full`.

  With F devices along `fsdp` and S along `tokens`, M positions on a device, width D, and n₁ … n₅
  parameter tokens of query, key, value, output and feed-forward, of which a device has a part of
  keys and values [nᵢ / S, D / F]:

    weights     keys and values of each Pattention gathered over fsdp, forward and once more for
                the backward pass:       2 · 10 gathers, in all 2 · Σ 2 nᵢ/S D · 2 bytes (F−1)/F
    gradients   of the same, summed and scattered: 10, in all Σ 2 nᵢ/S D · 2 bytes (F−1)/F
    row norms   a number for every position summed over tokens, which is kept, and a gradient:
                                         2 · 5 sums of M · 4 bytes, each 2 (S−1)/S of that
    outputs     of query, key and value summed into heads, scattered: 3 forward, 3 once more;
                of the output projection and of feed-forward summed whole: 2 forward, and that of
                the output projection once more
    inputs      of the output projection, from heads: gathered forward and once more
    backward    the gradient at query, key and value gathered from heads; of their common input and
                of feed-forward's summed whole; of the output projection's input scattered to heads
                                         each M D · 2 bytes (S−1)/S, twice that where whole

  Args:
    model: as in a config.
    fsdp: F.
    tokens: S.
    positions: M.
  """
  mixer, ffn = model['layer']['mixer'], model['layer']['ffn']
  tokens_of_layer = 3 * mixer['qkv']['tokens'] + mixer['proj']['tokens'] + ffn['tokens']
  matrices = 2 * tokens_of_layer * model['width']
  weights = matrices / tokens * ACTIVATION * (fsdp - 1) / fsdp
  part = (tokens - 1) / tokens
  norms = positions * NORM * 2 * part
  activations = positions * model['width'] * ACTIVATION * part
  over_fsdp = [
    Expected('fsdp', 'all-gather', 'weights', 20, 2 * weights),
    Expected('fsdp', 'reduce-scatter', 'gradients', 10, weights),
  ]
  over_tokens = [
    Expected('tokens', 'all-reduce', 'row norms', 10, 10 * norms),
    Expected('tokens', 'all-reduce', 'outputs', 3, 3 * 2 * activations),
    Expected('tokens', 'all-reduce', 'gradients of inputs', 2, 2 * 2 * activations),
    Expected('tokens', 'reduce-scatter', 'outputs to heads', 6, 6 * activations),
    Expected('tokens', 'reduce-scatter', 'gradients to heads', 1, activations),
    Expected('tokens', 'all-gather', 'heads', 2, 2 * activations),
    Expected('tokens', 'all-gather', 'gradients of heads', 3, 3 * activations),
  ]
  return (over_fsdp if fsdp > 1 else []) + (over_tokens if tokens > 1 else [])


def depth(figures: Figures) -> int:
  """Return the number of layers of the model that was planned."""
  return from_dict(ModelConfig, figures['config']['model']).depth


def per_layer(shallow: Figures, deep: Figures) -> dict[tuple[str, str], tuple[float, float]]:
  """Number and bytes of a layer's collectives, by axis and kind: what more layers have more."""
  layers = depth(deep) - depth(shallow)
  totals: dict[tuple[str, str], tuple[float, float]] = {}
  for sign, figures in ((1, deep), (-1, shallow)):
    for row in figures['traffic']:
      key = row['axis'], row['kind']
      number, received = totals.get(key, (0.0, 0.0))
      totals[key] = (
        number + sign * row['count'] / layers,
        received + sign * row['gigabytes'] * 1e9 / layers,
      )
  return {key: one for key, one in totals.items() if any(one)}


def rows(mesh: str, wanted: list[Expected], found: dict[tuple[str, str], Any]) -> list[Row]:
  """The lines of a mesh: a collective each, and the sum of every axis."""
  lines = []
  kinds = dict.fromkeys([(one.axis, one.kind) for one in wanted] + sorted(found))
  for key in kinds:
    ours = [one for one in wanted if (one.axis, one.kind) == key]
    number, received = found.get(key, (0.0, 0.0))
    lines.append(
      (
        mesh,
        *key,
        ', '.join(f'{one.number} {one.what}' for one in ours),
        str(sum(one.number for one in ours)),
        f'{number:.4g}',
        f'{sum(one.received for one in ours) / 1e6:,.1f}',
        f'{received / 1e6:,.1f}',
      )
    )
  for axis in dict.fromkeys(axis for axis, _ in kinds):
    should = sum(one.received for one in wanted if one.axis == axis)
    is_there = sum(received for (along, _), (_, received) in found.items() if along == axis)
    ratio = f'{is_there / should:.2f} × expected' if should else ''
    total = f'{should / 1e6:,.1f}', f'{is_there / 1e6:,.1f}'
    lines.append((mesh, axis, '**all**', ratio, '', '', *total))
  return lines


def main() -> None:
  """Plans the meshes at two depths and prints the table."""
  parser = cells.parser(__doc__, 'runs/collectives')
  parser.add_argument('--model', choices=MODELS, default='lm_pile:1_5b')
  parser.add_argument('--topology', default='v5e:4x4')
  parser.add_argument('--tokens', default='1,4,16', help='sizes of the mesh along tokens')
  parser.add_argument('--depths', default='2,4', help='two numbers of layers')
  args, others = parser.parse_known_args()
  model, devices = MODELS[args.model], topology.parse(args.topology).devices
  lines, used = [], []
  for tokens in map(int, args.tokens.split(',')):
    fsdp, rest = divmod(devices, tokens)
    if rest:
      sys.exit(f'--tokens={tokens} does not divide {devices} devices')
    mesh = f'{fsdp} fsdp × {tokens} tokens'
    sequences = model.rows(args.tokens_per_chip)  # of the devices that have the same rows
    found = []
    for layers in args.depths.split(','):
      flags = model.on(
        args.topology,
        sequences * fsdp,
        '--quick',
        '--config.train.remat=full',
        f'--config.mesh.tokens={tokens}',
        f'--config.model.pattern=layer*{layers}',
        *others,
      )
      label = f'{args.model}-{args.topology}-tokens{tokens}-layers{layers}'
      found.append(cells.planned(label, flags, args.out, report=args.report))
    if not all(found) or any('error' in one for one in found):
      reasons = [one['error'] for one in found if one and 'error' in one]
      print(f'{mesh}: {"; ".join(reasons) or "not planned"}', file=sys.stderr)
      continue
    used += found
    positions = sequences * model.length
    wanted = expected(found[0]['config']['model'], fsdp, tokens, positions)
    lines += rows(mesh, wanted, per_layer(*found))
  print(
    f'a layer of {args.model} on {args.topology}, {args.tokens_per_chip:,} positions on a device; '
    f'{cells.versions(used)}\n'
  )
  print(cells.table(HEAD, lines))


if __name__ == '__main__':
  main()
