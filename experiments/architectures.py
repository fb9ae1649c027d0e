r"""Compare architectures in small: blocks, windows, linear attention, gated units; their growth.

  python experiments/architectures.py --out=runs/arch                everything; goes on where it
                                                                     stopped
  python experiments/architectures.py --out=runs/arch --parts=pairs --seeds=0
  python experiments/architectures.py --out=runs/large --scale=10 --width=256   the larger form
  python experiments/architectures_report.py runs/arch docs          tables and pictures

Parts:

  blocks  Simplified Transformer Blocks (arXiv 2311.01906) against others, at equal width and depth
  speed   the time of a training step of each of them
  length  models trained on texts of LENGTH tokens, on texts up to 8 times as long (HWFA,
          kexue.fm/archives/9603)
  pairs   even pairs, on longer strings than in training: see even_pairs.py
  growth  architectures of parameter tokens, grown to twice their tokens by zero_keys

Three more parts run only if `--parts` names them:

  learned  the blocks with learned positions, as in the paper; `blocks` has rotary ones
  rates    the blocks at a third and at three times their learning rate
  depth    a few of the blocks with 48 layers

Runs on text call `tokenformer_jax.train` with a config. `--scale` multiplies the steps of all runs;
`--width` is that of the models of text.
"""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import even_pairs
import length_tests
import step_times
import trials

import tokenformer_jax
from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config

SIMPLIFIED = runpy.run_path(str(Path(__file__).parents[1] / 'configs/lm_simplified.py'))
PARTS = ('blocks', 'speed', 'length', 'pairs', 'growth', 'learned', 'rates', 'depth')
LAYERS, DEEP_LAYERS = 12, 48
BLOCK_STEPS, MODEL_STEPS, GROWTH_STEPS = 400, 600, 150
# Three times the paper's rates, 1e-3 and 3e-4 for v_skipinit: models are narrow and runs short.
RATE, SKIPINIT_RATE = 3e-3, 1e-3
RATE_FACTORS = (1 / 3, 3)  # of the part `rates`
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
DEEP = ('pre_ln', 'sas', 'sas_p', 'v_skipinit')
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
GROWN = ('sas_p, tokens', 'HWFA', 'GAU', 'linear')


@dataclasses.dataclass(frozen=True)
class Plan:
  """The directory of the runs, the factor on their steps, and the width of models of text."""

  out: Path
  scale: float
  width: int

  def steps(self, count: int) -> int:
    """Return the number of steps for a number at scale 1."""
    return max(1, round(count * self.scale))

  def block(
    self, name: str, seed: int, rate: float = RATE, layers: int = LAYERS, *, learned: bool = False
  ) -> Config:
    """Return the config of a run of the part `blocks`."""
    block, with_tokens = BLOCKS[name]
    values = config_lib.defaults()
    values.model.width = self.width
    values.model.layer.mixer.heads = self.width // HEAD_WIDTH
    values.model.init.std = 0.02 * (768 / self.width) ** 0.5  # 0.02 at the paper's width
    hidden = (4 if layers == LAYERS else 2) * self.width  # half in the paper's depth study
    SIMPLIFIED['set_blocks'](values, layers, hidden, block, with_tokens)
    if learned:
      values.model.position_embedding = 'learned'
    else:
      values.model.layer.mixer.positions = {'kind': 'rotary', 'fraction': 1.0}
    return self.on_text(values, seed, self.steps(BLOCK_STEPS), rate)

  def model(self, name: str, seed: int, rate: float, *, with_tokens: bool = False) -> Config:
    """Return the config of a run of the part `length`, or with parameter tokens of `growth`."""
    pattern, mixer, variants = MODELS[name]
    values = config_lib.defaults()
    model, width = values.model, self.width
    layer, projection = model.layer, {'kind': 'dense'}
    model.width, model.pattern, model.init.std = width, pattern, 0.1
    layer.ffn = {'kind': 'mlp'}
    if with_tokens:
      projection = {'kind': 'pattention', 'tokens': width}
      layer.ffn = {'kind': 'pattention', 'tokens': 4 * width}
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
    return self.on_text(values, seed, self.steps(MODEL_STEPS), rate)

  def on_text(self, values: Any, seed: int, steps: int, rate: float) -> Config:
    """Return a config for the text of the Python standard library."""
    values.data.update(source='stdlib', tokenizer='bytes', sequence_length=LENGTH, batch_size=8)
    values.optim.update(learning_rate=rate, warmup_steps=max(1, steps // 20), final_fraction=0.1)
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

  def train_block(self, name: str, seed: int, part: str = 'blocks', factor: float = 1.0) -> Path:
    """Return the run of a block, at its rate times a factor."""
    rate = factor * (SKIPINIT_RATE if name == 'v_skipinit' else RATE)
    layers = DEEP_LAYERS if part == 'depth' else LAYERS
    config = self.block(name, seed, rate, layers, learned=part == 'learned')
    return trials.once(self.out, f'{part}/{name}/{seed}', config)


def blocks(plan: Plan, seed: int) -> None:
  """Train each block."""
  for name in BLOCKS:
    plan.train_block(name, seed)


def learned(plan: Plan, seed: int) -> None:
  """Train each block with learned positions."""
  for name in BLOCKS:
    plan.train_block(name, seed, 'learned')


def depth(plan: Plan, seed: int) -> None:
  """Train a few blocks with many layers."""
  for name in DEEP:
    plan.train_block(name, seed, 'depth')


def rates(plan: Plan, seed: int) -> None:
  """Train each block at other rates."""
  for name in BLOCKS:
    for factor in RATE_FACTORS:
      plan.train_block(name, seed, f'rates/{factor:.2g}', factor)


def speed(plan: Plan, seed: int) -> None:
  """Measure a training step of each block, in turns, for each of REMATS."""
  if seed == 0 and not (file := plan.out / 'speed.json').exists():
    configs = {(name, remat): plan.block(name, 0) for name in BLOCKS for remat in REMATS}
    configs = {
      key: dataclasses.replace(config, train=dataclasses.replace(config.train, remat=key[1]))
      for key, config in configs.items()
    }
    found = step_times.measure(configs)
    write(file, {name: {remat: found[name, remat] for remat in REMATS} for name in BLOCKS})


def length(plan: Plan, seed: int) -> None:
  """Train each model, and measure it on longer texts."""
  for name in MODELS:
    run = trials.once(plan.out, f'length/{name}/{seed}', plan.model(name, seed, RATE))
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


def growth(plan: Plan, seed: int) -> None:
  """Grow one architecture of each kind, and train it on beside one that did not grow."""
  for name in GROWN:
    if name in BLOCKS:
      base, config = plan.train_block(name, seed), plan.block(name, seed)
    else:
      config = plan.model(name, seed, RATE, with_tokens=True)
      base = trials.once(plan.out, f'growth/{name}/base/{seed}', config)
    counts = {k: 2 * count for k, count in config_lib.token_counts(config.model).items()}
    workdir = plan.out / f'growth/{name}/exact/{seed}'
    if not (file := workdir.with_suffix('.json')).exists():
      before = tokenformer_jax.load(base)
      after = before.grow(workdir, counts, method='zero_keys')
      rows, _ = before.held_out(16)
      logits = [run.logits(rows, exact=True) for run in (before, after)]
      largest = float(abs(logits[0] - logits[1]).max())
      write(file, {'difference': largest, 'logit': float(abs(logits[0]).max())})
    trained = plan.steps(BLOCK_STEPS if name in BLOCKS else MODEL_STEPS)
    steps = trained + plan.steps(GROWTH_STEPS)
    for arm, tokens in (('not grown', {}), ('grown', counts)):
      continued = continue_from(base, config, steps, tokens)
      trials.once(plan.out, f'growth/{name}/{arm}/{seed}', continued)


def continue_from(base: Path, config: Config, steps: int, counts: dict[str, int]) -> Config:
  """Return the config that continues from a run, with other counts of parameter tokens."""
  model = config_lib.with_token_counts(config.model, counts)
  return dataclasses.replace(
    config,
    model=model,
    init_from=str(base),
    grow=config_lib.growth('zero_keys'),
    train=dataclasses.replace(config.train, steps=steps, eval_every=20),
    optim=dataclasses.replace(config.optim, warmup_steps=10),
  )


def write(file: Path, content: Any) -> None:
  """Write figures as JSON, whole or not at all."""
  file.parent.mkdir(parents=True, exist_ok=True)
  new = file.with_suffix('.new')
  new.write_text(json.dumps(content, indent=1) + '\n')
  new.rename(file)


def main() -> None:
  """Run the parts."""
  parser = trials.parser(__doc__.splitlines()[0], PARTS)
  parser.set_defaults(parts=','.join(PARTS[:-3]))
  parser.add_argument('--scale', type=float, default=1.0)
  parser.add_argument('--width', type=int, default=64)
  args, out, parts, seeds = trials.begin(parser, PARTS)
  form = {'scale': args.scale, 'width': args.width}
  if (kept := out / 'form.json').exists() and json.loads(kept.read_text()) != form:
    parser.error(f'{out} has runs with {kept.read_text().strip()}; choose another --out')
  write(kept, form)
  plan = Plan(out, args.scale, args.width)
  by_name = {f.__name__: f for f in (blocks, speed, length, pairs, growth, learned, rates, depth)}
  # Finish one seed after the other, so that an interrupted experiment has complete seeds.
  for seed in seeds:
    for part in parts:
      by_name[part](plan, seed)


if __name__ == '__main__':
  main()
