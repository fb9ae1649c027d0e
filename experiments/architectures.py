r"""Compare architectures in small: blocks, windows, linear attention, gated units.

  python experiments/architectures.py --out=runs/arch                everything; goes on where it
                                                                     stopped
  python experiments/architectures.py --out=runs/arch --parts=pairs --seeds=0
  python experiments/architectures.py --out=runs/large --scale=10 --width=256   the larger form
  python experiments/architectures.py --out=runs/arch --pictures=docs

The command then prints the tables of docs/architectures.md over the finished seeds, those of even
pairs seed by seed. Losses of text are bits per byte on held-out text.

Parts:

  blocks  Simplified Transformer Blocks (arXiv 2311.01906) against others, at equal width and depth
  speed   the time of a training step of each of them
  length  models trained on texts of LENGTH tokens, on texts up to 8 times as long (HWFA,
          kexue.fm/archives/9603)
  pairs   even pairs, on longer strings than in training: see even_pairs.py

Commit 073fc943 has four more parts, whose figures are in that page: other rates, learned positions,
48 layers, and growth.

Runs on text call `tokenformer_jax.train` with a config. `--scale` multiplies the steps of all runs;
`--width` is that of the models of text.
"""

import dataclasses
import json
import runpy
import statistics
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import even_pairs
import jax
import length_tests
import numpy as np
import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax import tasks
from tokenformer_jax.config import Config
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.pictures import styled
from tokenformer_jax.steps import step as step_lib

Curve = dict[int, float]  # step → bits per byte
NATS = 0.6931471805599453  # of a bit; a token is a byte
LEARNED = 0.1  # loss of the answer, in nats, below which a model knows even pairs

SIMPLIFIED = runpy.run_path(str(Path(__file__).parents[1] / 'configs/lm_simplified.py'))
PARTS = ('blocks', 'speed', 'length', 'pairs')
LAYERS, BLOCK_STEPS, MODEL_STEPS = 12, 400, 600
# Three times the paper's rates, 1e-3 and 3e-4 for v_skipinit: models are narrow and runs short.
RATE, SKIPINIT_RATE = 3e-3, 1e-3
REMATS = ('auto', 'dots')  # values of train.remat, in the part `speed`
CLIPS = (16, 32)  # of distances, in tests of ReRoPE
HEAD_WIDTH, LENGTH, WINDOW = 16, 64, 10  # windows reach 9 · 5 + 1 = 46 of 0.75 · 64 positions
# Name → block of configs/lm_simplified.py, and whether it is made of parameter tokens.
BLOCKS = {
  'pre_ln': ('pre_ln', False),
  'parallel': ('parallel', False),
  'sas': ('sas', False),
  'sas_p': ('sas_p', False),
  'sas_p_nonorm': ('sas_p_nonorm', False),
  'v_skipinit': ('v_skipinit', False),
  'skipless': ('skipless', False),
  'pre_ln, tokens': ('pre_ln', True),
  'sas, tokens': ('sas', True),
  'sas_p, tokens': ('sas_p', True),
}
LOCAL = {'mixer': {'window': WINDOW}}
FREE = {'mixer': {'positions': {'kind': 'none'}, 'length_scale': {'kind': 'position'}}}
SOFTMAX = {'positions': {'fraction': 1.0}}
LINEAR = {'kind': 'linear', **SOFTMAX}
UNIT = {'kind': 'gated_unit', 'head_width': 32, **SOFTMAX}
# Name → pattern, mixer, and variants of the layer.
MODELS = {
  'full RoPE': ('layer*6', SOFTMAX, {}),
  'HWFA': ('local*5 full', SOFTMAX, {'local': LOCAL, 'full': FREE}),
  'local*5 full': ('local*5 layer', SOFTMAX, {'local': LOCAL}),
  'local*6': ('local*6', SOFTMAX, {'local': LOCAL}),
  'linear': ('layer*6', LINEAR, {}),
  'GAU': ('layer*12', UNIT, {}),  # Two units take the place of attention and feed-forward part.
  'GAU, HWFA': ('local*11 full', UNIT, {'local': {'mixer': {'window': 5}}, 'full': FREE}),
}
SPEED_ROUNDS, SPEED_STEPS = 5, 8


@dataclasses.dataclass(frozen=True)
class Plan:
  """The directory of the runs, the factor on their steps, and the width of models of text."""

  out: Path
  scale: float
  width: int

  def steps(self, count: int) -> int:
    """Return the number of steps for a number at scale 1."""
    return max(1, round(count * self.scale))

  def block(self, name: str, seed: int) -> Config:
    """Return the config of a run of the part `blocks`."""
    block, with_tokens = BLOCKS[name]
    values = config_lib.defaults()
    values.model.width = self.width
    values.model.layer.mixer.heads = self.width // HEAD_WIDTH
    values.model.init.std = 0.02 * (768 / self.width) ** 0.5  # 0.02 at the paper's width
    SIMPLIFIED['set_blocks'](values, LAYERS, 4 * self.width, block, with_tokens)
    values.model.layer.mixer.positions = {'kind': 'rotary', 'fraction': 1.0}
    rate = SKIPINIT_RATE if name == 'v_skipinit' else RATE
    return self.on_text(values, seed, self.steps(BLOCK_STEPS), rate)

  def model(self, name: str, seed: int) -> Config:
    """Return the config of a run of the part `length`."""
    pattern, mixer, variants = MODELS[name]
    values = config_lib.defaults()
    model, width = values.model, self.width
    layer, projection = model.layer, {'kind': 'dense'}
    model.width, model.pattern, model.init.std = width, pattern, 0.1
    layer.ffn = {'kind': 'mlp'}
    places = ('uvq', 'out') if mixer is UNIT else ('qkv', 'proj')
    layer.mixer = {
      **(mixer or {'positions': {'fraction': 1.0}}),
      **dict.fromkeys(places, projection),
    }
    if mixer is UNIT:
      layer.ffn = {'kind': 'none'}
    else:
      layer.mixer.heads = width // HEAD_WIDTH
    for variant, changes in variants.items():
      model.variants[variant] = changes
    return self.on_text(values, seed, self.steps(MODEL_STEPS), RATE)

  def on_text(self, values: Any, seed: int, steps: int, rate: float) -> Config:
    """Return a config for the text of the Python standard library."""
    values.data.update(source='stdlib', tokenizer='bytes', sequence_length=LENGTH, batch_size=8)
    values.optim.update(learning_rate=rate, warmup_steps=max(1, steps // 20))
    values.optim.new_token_warmup = 0
    values.train.update(
      steps=steps,
      seed=seed,
      log_every=50,
      eval_every=max(1, steps // 8),
      eval_batches=32,
      checkpoint_every=10**9,
      keep_checkpoints=1,
      sample_tokens=0,
      loss_chunk=LENGTH,
      trackers=(),
    )
    return config_lib.resolve(values)

  def blocks(self, seed: int) -> None:
    """Train all blocks."""
    for name in BLOCKS:
      trials.once(self.out, f'blocks/{name}/{seed}', self.block(name, seed))


def speed(plan: Plan, seed: int) -> None:
  """Measure a training step of each block, in turns, for each of REMATS."""
  if seed == 0 and not (file := plan.out / 'speed.json').exists():
    configs = {(name, remat): plan.block(name, 0) for name in BLOCKS for remat in REMATS}
    configs = {
      key: dataclasses.replace(config, train=dataclasses.replace(config.train, remat=key[1]))
      for key, config in configs.items()
    }
    times = measure_steps(configs)
    write(file, {name: {remat: times[name, remat] for remat in REMATS} for name in BLOCKS})


def length(plan: Plan, seed: int) -> None:
  """Train each model, and measure it on longer texts."""
  for name in MODELS:
    run = trials.once(plan.out, f'length/{name}/{seed}', plan.model(name, seed))
    clips = {f', ReRoPE {clip}': clip for clip in CLIPS} if name == 'full RoPE' else {}
    for added, clip in {'': 0, **clips}.items():
      if not (file := run / f'lengths{added}.json').exists():
        write(file, length_tests.measure(run, clip))


def pairs(plan: Plan, seed: int) -> None:
  """Train each model of even pairs."""
  for name in even_pairs.ARMS:
    file = plan.out / f'pairs/{name}/{seed}.json'
    if not file.exists():
      print(f'== pairs/{name}/{seed}', flush=True)
      write(file, even_pairs.train_and_test(name, seed, plan.steps(even_pairs.STEPS)))


def write(file: Path, content: Any) -> None:
  """Write figures as JSON, whole or not at all."""
  file.parent.mkdir(parents=True, exist_ok=True)
  new = file.with_suffix('.new')
  new.write_text(json.dumps(content, indent=1) + '\n')
  new.rename(file)


def measure_steps(configs: dict[Hashable, Config]) -> dict[Hashable, dict[str, float]]:
  """Return by key the parameters, and the median seconds of a step over the rounds.

  `cpu` is the time that this process has spent on the processor. On a single core it is the time of
  a step on a free machine, also while other programs run.
  """
  mesh = sharding.make_mesh(next(iter(configs.values())).mesh, sharding.find_devices())
  with jax.set_mesh(mesh):
    made = {name: make_step(config, mesh) for name, config in configs.items()}
    times = {name: [] for name in configs}
    for _ in range(SPEED_ROUNDS):
      for name, (step, state, batch, _) in made.items():
        begin = time.process_time()
        for _ in range(SPEED_STEPS):
          state, figures = step(state, batch)
        jax.block_until_ready(figures)
        times[name].append((time.process_time() - begin) / SPEED_STEPS)
        made[name] = (step, state, *made[name][2:])
  return {
    name: {
      'parameters': made[name][3],
      'tokens': configs[name].data.batch_size * configs[name].data.sequence_length,
      'cpu': statistics.median(seconds),
    }
    for name, seconds in times.items()
  }


def make_step(config: Config, mesh: jax.sharding.Mesh) -> tuple[Any, Any, np.ndarray, int]:
  """Return the compiled step, a state after one step, a batch, and the number of parameters."""
  config = complete(config)
  task = tasks.make(config)
  program = step_lib.make_program(task, config)
  start = jax.jit(program.initial_state, out_shardings=program.state_shardings(mesh))
  step = step_lib.make_train_step(program, mesh)
  shape = task.abstract_batch().shape
  batch = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  state, _ = step(start(0), batch)
  return step, state, batch, task.definition.count


def read_curves(folder: Path) -> list[Curve]:
  """Return the evaluations of all finished seeds under a folder."""
  return [
    {line['step']: line['eval/bits_per_byte'] for line in trials.evaluations(run)}
    for run in trials.finished(folder)
  ]


def read_all(folder: Path, pattern: str) -> list[Any]:
  """Return the content of all JSON files of a pattern under a folder."""
  return [json.loads(file.read_text()) for file in sorted(folder.glob(pattern))]


def at(curve: Curve, step: float) -> float:
  """Return the loss at a step, linear between evaluations."""
  return float(np.interp(step, list(curve), list(curve.values())))


def mean(curves: Sequence[Curve]) -> Curve:
  """Return the mean over seeds, at the steps that all seeds have."""
  steps = set.intersection(*(set(c) for c in curves)) if curves else set()
  return {step: statistics.mean(c[step] for c in curves) for step in sorted(steps)}


@styled()
def report_blocks(out: Path, pictures: Path) -> None:
  """Report the loss of each block by steps and by time."""
  times = json.loads(file.read_text()) if (file := out / 'speed.json').exists() else {}
  curves = {name: read_curves(out / 'blocks' / name) for name in BLOCKS}
  curves = {name: each for name, each in curves.items() if each}
  last = max(max(each[0]) for each in curves.values())
  timed = {}  # name → seconds of a step
  if times:
    timed = {name: min(run['cpu'] for run in times[name].values()) for name in curves}
  fastest = last * min(timed.values(), default=0)
  budget = [f'{fastest:.1f} s of CPU'] if timed else []
  points = [last // 4, last // 2, last]
  rows = [['', *(f'{p} steps' for p in points), *budget, 'seeds']]
  for name, each in curves.items():
    losses = [trials.spread(at(c, point) for c in each) for point in points]
    there = [trials.spread(at(c, fastest / timed[name]) for c in each)] if timed else []
    rows.append([name, *losses, *there, str(len(each))])
  print('## blocks\n')
  trials.table(rows)
  if not timed:
    return
  remats = REMATS
  rows = [['', 'parameters', *(f'ms of CPU a step, remat={r}' for r in remats), 'tokens/s']]
  for name, seconds in timed.items():
    first = times[name][remats[0]]
    each = (f'{times[name][remat]["cpu"] * 1e3:.1f}' for remat in remats)
    rows.append([name, f'{first["parameters"]:,}', *each, f'{first["tokens"] / seconds:,.0f}'])
  print('## speed\n')
  trials.table(rows)
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for pictures)

  figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
  for name, each in curves.items():
    line, style = mean(each), '--' if 'tokens' in name else '-'
    by_step.plot(line.keys(), line.values(), style, label=name, lw=1.3)
    if name in timed:
      by_time.plot([s * timed[name] for s in line], line.values(), style, label=name, lw=1.3)
  by_step.set(xlabel='steps', ylabel='bits per byte, held out')
  by_time.set(xlabel='seconds of CPU')
  finish(by_time, figure, pictures / 'architectures_blocks.png')


def tested(out: Path) -> Iterator[tuple[str, list[Any]]]:
  """Yield the name and the tests on longer texts of each model."""
  for name in MODELS:
    folder = out / f'length/{name}'
    for file in ('lengths', *(f'lengths, ReRoPE {clip}' for clip in CLIPS)):
      if each := read_all(folder, f'*/{file}.json'):
        yield name + file.removeprefix('lengths'), each


@styled()
def report_length(out: Path, pictures: Path) -> None:
  """Report loss and accuracy on longer texts."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for pictures)

  lengths = [str(LENGTH * times) for times in length_tests.TIMES]
  figure, all_axes = plt.subplots(1, 3, figsize=(13, 4.2))
  sections = (('text', 'loss'), ('text', 'accuracy'), ('repeats', 'loss'), ('repeats', 'accuracy'))
  drawn = {('text', 'loss'): 0, ('repeats', 'loss'): 1, ('repeats', 'accuracy'): 2}
  for kind, figure_name in sections:
    unit = 'bits per byte' if figure_name == 'loss' else 'accuracy, %'
    factor = 1 / NATS if figure_name == 'loss' else 100
    rows = [['', *(f'{n} tokens' for n in lengths), 'seeds']]
    for name, each in tested(out):
      values = [[factor * run[kind][n][figure_name] for run in each] for n in lengths]
      digits = 3 if figure_name == 'loss' else 1
      rows.append([name, *(trials.spread(v, digits) for v in values), str(len(each))])
      if (kind, figure_name) in drawn:
        axes = all_axes[drawn[kind, figure_name]]
        style = ':' if 'ReRoPE' in name else '-'
        means = [statistics.mean(v) for v in values]
        axes.plot([int(n) for n in lengths], means, f'o{style}', ms=3, lw=1.3, label=name)
        axes.set(xlabel='tokens of a text', title=f'{kind}: {unit}', xscale='log')
        axes.set_xticks([int(n) for n in lengths], lengths)
        axes.minorticks_off()
    print(f'## length: {kind}, {unit}\n')
    trials.table(rows)
  all_axes[0].set_ylim(top=5.2)  # room for the legend
  finish(all_axes[0], figure, pictures / 'architectures_length.png')


@styled()
def report_pairs(out: Path, pictures: Path) -> None:
  """Report the accuracy of even pairs by length."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for pictures)

  print('## pairs: accuracy of each seed, %\n')
  lengths = [str(n) for n in even_pairs.TESTS]
  rows = [['', f'loss below {LEARNED} at step', *(f'{n} letters' for n in lengths)]]
  others = [(name, 'accuracy') for name in even_pairs.ARMS if name != 'HWFA']
  figure, axes = plt.subplots(figsize=(8, 4.5))
  for name, field in [('HWFA', 'accuracy'), ('HWFA', 'unscaled'), *others]:
    if each := read_all(out / f'pairs/{name}', '*.json'):
      firsts = [next((s for s, loss in run['losses'] if loss < LEARNED), None) for run in each]
      learned = ', '.join('never' if step is None else str(step) for step in firsts)
      values = [[100 * run[field][n] for run in each] for n in lengths]
      label = name if field == 'accuracy' else 'no length scale'
      # A seed has learned the task or not, so a mean would describe none of them.
      rows.append([label, learned, *(', '.join(f'{value:.0f}' for value in v) for v in values)])
      style, color = ('--' if field == 'unscaled' else '-'), f'C{len(rows) - 2}'
      for seed, line in enumerate(zip(*values, strict=True)):
        text = label if seed == 0 else None
        first = {'lw': 2, 'zorder': 3} if label == 'HWFA' else {'lw': 1}
        axes.plot(
          [int(n) for n in lengths], line, f'o{style}', color=color, ms=3, label=text, **first
        )
  trials.table(rows)
  axes.set(xlabel='letters of a string', ylabel='accuracy, %', xscale='log')
  axes.set_xticks([int(n) for n in lengths], lengths)
  axes.minorticks_off()
  finish(axes, figure, pictures / 'architectures_pairs.png')


def finish(axes: Any, figure: Any, path: Path) -> None:
  """Add the legend, and write the file."""
  axes.legend(fontsize=7)
  figure.savefig(path)


def report(out: Path, pictures: Path | None) -> None:
  """Report on every part that has runs."""
  pictures = pictures or out
  reports = {
    'blocks': lambda: report_blocks(out, pictures),
    'length': lambda: report_length(out, pictures),
    'pairs': lambda: report_pairs(out, pictures),
  }
  for part, show in reports.items():
    if (out / part).exists():
      show()


def main() -> None:
  """Run the parts."""
  parser = trials.parser(__doc__.splitlines()[0], PARTS)
  parser.add_argument('--scale', type=float, default=1.0)
  parser.add_argument('--width', type=int, default=64)
  parser.add_argument('--pictures', type=Path, help='the folder for pictures; default: --out')
  args, out, parts, seeds = trials.begin(parser, PARTS)
  form = {'scale': args.scale, 'width': args.width}
  if (kept := out / 'form.json').exists() and json.loads(kept.read_text()) != form:
    parser.error(f'{out} has runs with {kept.read_text().strip()}; choose another --out')
  write(kept, form)
  plan = Plan(out, args.scale, args.width)
  others = {made.__name__: made for made in (speed, length, pairs)}
  # Finish one seed after the other, so that an interrupted experiment has complete seeds.
  for seed in seeds:
    for part in parts:
      if part in others:
        others[part](plan, seed)
      else:
        plan.blocks(seed)
  report(out, args.pictures)


if __name__ == '__main__':
  main()
