r"""Compare the data that chips must exchange for a layer with the exchange of the compiled program.

  python benchmarks/collectives.py                                 1_5b on v5e:4x4
  python benchmarks/collectives.py --model=lm_openwebtext:1_4b --topology=v5p:2x2x1 --tokens=1,2,4
  python benchmarks/collectives.py --groups=1 --tokens=4,16        a group of tokens on each device
  python benchmarks/collectives.py --model=lm_deepseekmoe:16b --topology=v5p:4x4x4 --experts=8,64

For a mixture, the meshes split by `fsdp` and by each number of `experts`. For other models they
split by `fsdp` alone, by `tokens` alone and by both. Recomputation is `full`. The data of a layer
is the difference between two depths per layer, which leaves out the head and the embedding. A
collective of several arrays, which the compiler merges, counts once. A whole sum instead of a
scattered one shows as an all-reduce of twice the bytes.

The command lays out two programs for each mesh, in seconds. It needs `pip install -e ".[tpu]"`, but
no TPU. Cells are kept in `--out`, as in pods.py.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cells
from cells import MIXTURES, MODELS, Figures, Row

from tokenformer_jax.config import Config, ModelConfig, file, from_dict
from tokenformer_jax.model import dispatch
from tokenformer_jax.plan import topology

HEAD = (
  *('mesh', 'along', 'collective', 'expected', 'number', 'compiled'),
  *('MB in, expected', 'MB in, compiled'),
)
ACTIVATION, NORM = 2, 4  # bytes of bfloat16 and float32


@dataclasses.dataclass(frozen=True)
class Expected:
  """Equal collectives of one layer in a step."""

  axis: str  # of the mesh
  kind: str  # the planner's name of the collective
  purpose: str
  number: int
  received: float  # bytes that a device receives in all of them


def expected(
  model: dict[str, Any], fsdp: int, tokens: int, positions: int, groups: int = 0
) -> list[Expected]:
  """Return the collectives that a layer needs in a step with recomputation `full`.

  There are F devices along `fsdp` and S along `tokens`, M positions on a device, width D, and
  n₁ … n₅ parameter tokens of query, key, value, output and feed-forward. A device has the part
  [nᵢ / S, D / F] of keys and values.

    weights     gathers over fsdp of each Pattention's keys and values, in the forward pass and
                again in the backward pass: 2 · 10, in all 2 · Σ 2 nᵢ/S D · 2 bytes (F−1)/F
    gradients   reduce-scatters of the same arrays: 10, in all Σ 2 nᵢ/S D · 2 bytes (F−1)/F
    row norms   sums over tokens of a number for every position, which is kept, and of a gradient:
                2 · 5 sums of M · 4 bytes, each 2 (S−1)/S of that; none if each group lies
                on one device
    outputs     query, key and value are reduce-scattered to heads: 3 forward, 3 recomputed; output
                projection and feed-forward are summed whole: 2 forward, and the output projection
                once recomputed
    inputs      the output projection's input is gathered from heads, forward and recomputed
    backward    the gradients at query, key and value are gathered from heads; those of their common
                input and of feed-forward's input are summed whole; that of the output projection's
                input is scattered to heads; each M D · 2 bytes (S−1)/S, or twice that if whole

  `model` is a config's dict. `groups` is the number of groups of tokens on each device; 0: all
  tokens are one group.
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
    *([] if groups else [Expected('tokens', 'all-reduce', 'row norms', 10, 10 * norms)]),
    Expected('tokens', 'all-reduce', 'outputs', 3, 3 * 2 * activations),
    Expected('tokens', 'all-reduce', 'gradients of inputs', 2, 2 * 2 * activations),
    Expected('tokens', 'reduce-scatter', 'outputs to heads', 6, 6 * activations),
    Expected('tokens', 'reduce-scatter', 'gradients to heads', 1, activations),
    Expected('tokens', 'all-gather', 'heads', 2, 2 * activations),
    Expected('tokens', 'all-gather', 'gradients of heads', 3, 3 * activations),
  ]
  return (over_fsdp if fsdp > 1 else []) + (over_tokens if tokens > 1 else [])


def expected_in_mixture(
  model: ModelConfig, fsdp: int, experts: int, rows: int, length: int
) -> list[Expected]:
  """Return the collectives that a layer with experts needs in a step with recomputation `full`.

  There are F devices along `fsdp` and X along `experts`, N = F X in all, and width D. A device has
  the part [E / X, D / F, …] of the experts' arrays, and D / N of the width of all others.

    weights     gathers over both axes of the mixer's and the shared part's arrays, A bytes, forward
                and again backward: 2 A (N−1)/N; over fsdp of its own experts, B bytes: 2 B (F−1)/F.
                No device gathers other experts
    router      gathers in float32 forward and again backward, and a sum of the gradient: D E · 4
                bytes
    gradients   reduce-scatters of A over fsdp, then of A / F over experts; of B over fsdp
    tokens      all-to-alls over experts of the slots of the other devices: rows to experts and
                back, forward, again and for the gradients, 6 of width · 2 bytes; and the number of
                each row's expert, forward and again, 2 of 4 bytes

  The model has dense projections and equal layers with experts. A device has `rows` sequences of
  `length` tokens.
  """
  width, ffn = model.width, model.layer.ffn
  devices = fsdp * experts
  inner, shared = (2 + ffn.expert.gated, 2 + ffn.shared.gated)
  others = (4 * width + shared * ffn.shared.width) * width * ACTIVATION
  own = ffn.count // experts * inner * width * ffn.expert.width * ACTIVATION
  router = width * ffn.count * NORM
  all_axes = '+'.join(name for name, size in (('fsdp', fsdp), ('experts', experts)) if size > 1)
  fsdp_share, experts_share, share = (1 - 1 / size for size in (fsdp, experts, devices))
  top_k, local = ffn.router.top_k, ffn.count // experts
  choices = rows * length * top_k
  # The slots of the other devices along `experts`.
  slots = (experts - 1) * dispatch.device_slots(ffn.dispatch, choices, top_k, local, experts)
  number = 4 + shared
  collectives = [
    Expected('experts', 'all-to-all', 'tokens', 8, slots * (6 * width * ACTIVATION + 2 * 4)),
    Expected(all_axes, 'all-gather', 'weights', 2 * number, 2 * others * share),
    Expected(all_axes, 'all-gather', 'routers', 2, 2 * router * share),
    Expected(all_axes, 'all-reduce', 'gradient of the router', 1, 2 * router * share),
    Expected('fsdp', 'all-gather', 'experts', 2 * inner, 2 * own * fsdp_share),
    Expected('fsdp', 'reduce-scatter', 'gradients', number, others * fsdp_share),
    Expected('fsdp', 'reduce-scatter', 'gradients of experts', inner, own * fsdp_share),
    Expected('experts', 'reduce-scatter', 'gradients', number, others / fsdp * experts_share),
  ]
  return [equal for equal in collectives if equal.received]


def in_groups(model: dict[str, Any], groups: int) -> list[str]:
  """Return the flags that split each projection of a model into equal groups of tokens."""
  mixer, ffn = model['layer']['mixer'], model['layer']['ffn']
  sizes = {'mixer.qkv': mixer['qkv'], 'mixer.proj': mixer['proj'], 'ffn': ffn}
  flags = []
  for name, projection in sizes.items():
    size = projection['tokens'] // groups
    flags += [
      f'--config.model.layer.{name}.groups={size}*{groups}',
      f'--config.model.layer.{name}.reference=0',
    ]
  return flags


def depth(figures: Figures) -> int:
  """Return the number of layers of a planned model."""
  return from_dict(Config, figures['config']).model.depth


def per_layer(shallow: Figures, deep: Figures) -> dict[tuple[str, str], tuple[float, float]]:
  """Return number and bytes of a layer's collectives by axis and kind, from plans at two depths."""
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
  return {key: total for key, total in totals.items() if any(total)}


def rows(mesh: str, wanted: list[Expected], compiled: dict[tuple[str, str], Any]) -> list[Row]:
  """Return the rows of a mesh: one for each collective, and the sum of every axis."""
  lines = []
  kinds = dict.fromkeys([(equal.axis, equal.kind) for equal in wanted] + sorted(compiled))
  for key in kinds:
    ours = [equal for equal in wanted if (equal.axis, equal.kind) == key]
    number, received = compiled.get(key, (0.0, 0.0))
    lines.append(
      (
        mesh,
        *key,
        ', '.join(f'{group.number} {group.purpose}' for group in ours),
        str(sum(group.number for group in ours)),
        f'{number:.4g}',
        f'{sum(group.received for group in ours) / 1e6:,.1f}',
        f'{received / 1e6:,.1f}',
      )
    )
  for axis in dict.fromkeys(axis for axis, _ in kinds):
    should = sum(equal.received for equal in wanted if equal.axis == axis)
    is_there = sum(received for (along, _), (_, received) in compiled.items() if along == axis)
    ratio = f'{is_there / should:.2f} × expected' if should else ''
    total = f'{should / 1e6:,.1f}', f'{is_there / 1e6:,.1f}'
    lines.append((mesh, axis, '**all**', ratio, '', '', *total))
  return lines


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh."""

  mesh: str  # its sizes, for the table
  label: str  # the name of its cells
  holders: int  # the number of devices with different rows
  flags: tuple[str, ...]  # that set it
  wanted: Callable[[Figures], list[Expected]]  # maps a plan to the expected collectives of a layer


def cases(args: argparse.Namespace, devices: int, sequences: int) -> Iterator[Case]:
  """Yield the meshes of a model of parameter tokens."""
  model = MODELS[args.model]
  for tokens in map(int, args.tokens.split(',')):
    fsdp, rest = divmod(devices, tokens)
    if rest:
      sys.exit(f'--tokens={tokens} does not divide {devices} devices')
    groups = args.groups * tokens
    flags = [f'--config.mesh.tokens={tokens}']
    if groups:
      flags += in_groups(file.load(f'configs/{model.file}').model.to_dict(), groups)

    def wanted(figures: Figures, fsdp=fsdp, tokens=tokens, groups=groups) -> list[Expected]:
      return expected(figures['config']['model'], fsdp, tokens, sequences * model.length, groups)

    mesh = f'{fsdp} fsdp × {tokens} tokens' + (f', {groups} groups' if groups else '')
    yield Case(mesh, f'tokens{tokens}-groups{groups}', fsdp, tuple(flags), wanted)


def mixture_cases(args: argparse.Namespace, devices: int, sequences: int) -> Iterator[Case]:
  """Yield the meshes of a mixture."""
  for experts in map(int, args.experts.split(',')):
    fsdp, rest = divmod(devices, experts)
    if rest:
      sys.exit(f'--experts={experts} does not divide {devices} devices')

    def wanted(figures: Figures, fsdp=fsdp, experts=experts) -> list[Expected]:
      model = from_dict(Config, figures['config']).model
      return expected_in_mixture(model, fsdp, experts, sequences, MIXTURES[args.model].length)

    flags = (f'--config.mesh.experts={experts}',)
    yield Case(f'{fsdp} fsdp × {experts} experts', f'experts{experts}', devices, flags, wanted)


def main() -> None:
  """Plan the meshes at two depths and print the table."""
  parser = cells.parser(__doc__, 'runs/collectives', chooses=False)
  parser.add_argument('--model', choices=[*MODELS, *MIXTURES], default='lm_pile:1_5b')
  parser.add_argument('--topology', default='v5e:4x4')
  parser.add_argument('--tokens', default='1,4,16', help='sizes of the mesh along tokens')
  parser.add_argument('--experts', default='8', help='sizes along experts, for a mixture')
  parser.add_argument('--groups', type=int, default=0, help='groups on each device; 0: one in all')
  parser.add_argument('--depths', default='2,4', help='two numbers of layers')
  args, others = parser.parse_known_args()
  model, devices = {**MODELS, **MIXTURES}[args.model], topology.parse(args.topology).devices
  lines, used = [], []
  sequences = model.rows(args.tokens_per_chip)  # for the devices that share rows
  yield_cases = mixture_cases if args.model in MIXTURES else cases
  for case in yield_cases(args, devices, sequences):
    plans = []
    for layers in args.depths.split(','):
      flags = model.on(
        args.topology,
        sequences * case.holders,
        '--quick',
        '--config.train.remat=full',
        f'--config.model.pattern={model.before}layer*{layers}',
        *case.flags,
        *others,
      )
      label = f'{args.model}-{args.topology}-{case.label}-layers{layers}'
      plans.append(cells.planned(label, flags, args.out, report=args.report))
    if not all(plans) or any('error' in figures for figures in plans):
      reasons = [figures['error'] for figures in plans if figures and 'error' in figures]
      print(f'{case.mesh}: {"; ".join(reasons) or "not planned"}', file=sys.stderr)
      continue
    used += plans
    lines += rows(case.mesh, case.wanted(plans[0]), per_layer(*plans))
  print(
    f'a layer of {args.model} on {args.topology}, {args.tokens_per_chip:,} positions on a device; '
    f'{cells.versions(used)}\n'
  )
  print(cells.table(HEAD, lines))
  cells.write_csv(args.csv, HEAD, lines)


if __name__ == '__main__':
  main()
