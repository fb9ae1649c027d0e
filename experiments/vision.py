r"""Compare vision transformers on digits: TokenFormer and ViT, score functions, norms, growth.

  python experiments/vision.py --out=runs/vision             everything; continues where it stopped
  python experiments/vision.py --out=runs/vision --parts=scores --data=digits --seeds=0,1
  python experiments/vision.py --out=runs/vision --picture=docs/vision.png

The command then prints the tables of docs/vision.md: the last evaluation on held-out images, as
mean ± standard deviation over the finished seeds. Parts, after the TokenFormer paper (arXiv
2410.23168):

  models  TokenFormer against a ViT with as many parameters (Table 2)
  scores  the score functions of Pattention (Table 4)
  norms   norms with and without parameters (Table 5)
  growth  a trained model grown to twice its tokens, against that size from scratch with as many
          FLOPs

A model that several parts use is trained once. Every model has its own peak learning rate, chosen
by the loss of seed 0 after RATE_STEPS: RATES are tried, then halves and doubles, until the best
rate has a worse one on either side. The sets are scikit-learn's digits, and 22,000 compositions of
them with clutter (cluttered_digits/). Every run calls `tokenformer_jax.train` with a config.
"""

import dataclasses
import statistics
from pathlib import Path

import tensorflow_datasets as tfds
import trials
from cluttered_digits import cluttered_digits

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.config import file as config_file
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import saved_config
from tokenformer_jax.runs.pictures import styled

CONFIGS = Path(__file__).parents[1] / 'configs'
RATES = (1e-3, 2e-3, 4e-3)
SEEDS = 5  # The tables mark arms with fewer seeds.
STEPS, RATE_STEPS = 400, {'digits': 200, 'cluttered': 400}
DATA = {
  'digits': {},
  'cluttered': {
    'data__source': 'tfds:cluttered',
    'data__image_size': 32,
    'data__crop_area': 1.0,
    'model__patch': 8,
  },
}


def _score(kind: str) -> dict[str, str]:
  """Return the changes that give each projection another score."""
  projections = ('mixer__qkv', 'mixer__proj', 'ffn')
  return {f'model__layer__{name}__score__kind': kind for name in projections}


# Name → config file and changes.
ARMS = {
  'TokenFormer': ('vit_digits', {}),
  'ViT': ('transformer_vit_digits', {}),
  'ViT, biases and affine norms': (
    'transformer_vit_digits',
    {
      'model__layer__mixer__qkv__bias': True,
      'model__layer__mixer__proj__bias': True,
      'model__layer__ffn__bias': True,
      'model__layer__norm': 'affine',
    },
  ),
  'gelu_l2_norm': ('vit_digits', _score('gelu_l2_norm')),
  'gelu_l1_norm': ('vit_digits', _score('gelu_l1_norm')),
  'softmax': ('vit_digits', _score('softmax')),
  'affine norms': ('vit_digits', {'model__layer__norm': 'affine'}),
  'norms with a bias': ('vit_digits', {'model__layer__norm': 'bias'}),
  'grown': ('vit_digits', {}),
  'from scratch': ('vit_digits', {}),
}
# Part → labels in its table and the arms that it compares.
PARTS = {
  'models': {
    'TokenFormer': 'TokenFormer',
    'ViT': 'ViT',
    'ViT, biases and affine norms': 'ViT, biases and affine norms',
  },
  'scores': {
    'exp, L1 norm (softmax)': 'softmax',
    'GELU, L1 norm (gelu_l1_norm)': 'gelu_l1_norm',
    'GELU, L2 norm after it (gelu_l2_norm)': 'gelu_l2_norm',
    'GELU, L2 norm before it (l2_norm_gelu)': 'TokenFormer',
  },
  'norms': {
    'scale and bias': 'affine norms',
    'bias': 'norms with a bias',
    'neither': 'TokenFormer',
  },
  'growth': {
    'before it': 'TokenFormer',
    'grown': 'grown',
    'from scratch': 'from scratch',
  },
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """The directory and the data of the runs on one set of images."""

  out: Path
  data: str

  def config(self, name: str, seed: int, steps: int, rate: float, **more) -> Config:
    """Return a run's config; two underscores in the name of a change stand for a dot."""
    file, changes = ARMS[name]
    values = config_file.load(str(CONFIGS / f'{file}.py'))
    values.optim.learning_rate = rate
    values.train.update(
      steps=steps, seed=seed, eval_every=0, checkpoint_every=10**9, keep_checkpoints=1
    )
    values.train.trackers = ()
    together = {**DATA[self.data], **changes, **more}
    dotted = {name.replace('__', '.'): value for name, value in together.items()}
    return config_lib.resolve(values, config_lib.from_dotted(dotted))

  def run(self, name: str, config: Config) -> Path:
    """Train, unless the run is done; return the work directory."""
    return trials.once(self.out, f'{self.data}/{name}', config)

  def rate(self, name: str) -> float:
    """Return the best rate for an arm, which has a worse rate on either side."""
    losses, tried = {}, RATES
    while True:
      for rate in tried:
        config = self.config(name, 0, RATE_STEPS[self.data], rate)
        run = self.run(f'rates/{name}/{rate:g}', config)
        losses[rate] = trials.evaluations(run)[-1]['eval/loss']
      best = min(losses, key=losses.get)
      tried = [rate for rate in (best / 2, 2 * best) if rate not in losses]
      if not tried:
        return best

  def arm(self, name: str, seed: int) -> Path:
    """Return the run of an arm that is trained from scratch for STEPS steps."""
    config = self.config(name, seed, STEPS, self.rate(name))
    return self.run(f'{name}/{seed}', config)

  def growth(self, seed: int) -> None:
    """Grow the TokenFormer, and train the larger model from scratch with as many FLOPs."""
    base = self.arm('TokenFormer', seed)
    rate, steps = self.rate('TokenFormer'), STEPS
    small = self.config('TokenFormer', seed, steps, rate)
    counts = config_lib.token_counts(small.model)
    twice = {
      'model__layer__mixer__qkv__tokens': 2 * counts['qkv'],
      'model__layer__mixer__proj__tokens': 2 * counts['proj'],
      'model__layer__ffn__tokens': 2 * counts['ffn'],
      'grow__method__kind': 'zero_keys',
    }
    grown = self.config('grown', seed, steps + steps // 2, rate, init_from=str(base), **twice)
    self.run(f'grown/{seed}', grown)
    small_step, large_step = (flops.step_flops(complete(c)) for c in (small, grown))
    equal = round((steps * small_step + steps // 2 * large_step) / large_step)
    self.run(f'from scratch/{seed}', self.config('from scratch', seed, equal, rate, **twice))


def evaluations(folder: Path) -> list[dict[str, float]]:
  """Return the last evaluation of every finished seed."""
  return [trials.evaluations(run)[-1] for run in trials.finished(folder)]


def training_flops(out: Path, data: str, name: str) -> float:
  """Return the FLOPs of a run from its first step, including the model before a growth."""

  def read_config(arm: str) -> Config:
    path = next(iter(sorted((out / data / arm).glob('*/config.json'))))
    return saved_config.read(path, 'run the experiment again')

  config = read_config(name)
  steps, per_step = config.train.steps, flops.step_flops(config)
  if not config.init_from:
    return steps * per_step
  before = read_config('TokenFormer')
  first = before.train.steps
  return first * flops.step_flops(before) + (steps - first) * per_step


def report_rates(out: Path, data: str) -> None:
  """Print the loss of seed 0 by peak learning rate."""
  print(f'\nrates, {data}:\n')
  by_arm = {}
  for done in (out / data / 'rates').glob('*/*/done'):
    rate, arm = float(done.parent.name), done.parent.parent.name
    by_arm.setdefault(arm, {})[rate] = trials.evaluations(done.parent)[-1]['eval/loss']
  tried = sorted({rate for losses in by_arm.values() for rate in losses})
  rows = [['', *(f'{rate:g}' for rate in tried)]]
  for arm, losses in sorted(by_arm.items()):
    rows.append([arm, *(f'{losses[rate]:.3f}' if rate in losses else '' for rate in tried)])
  trials.table(rows)


def compare(out: Path, part: str) -> None:
  """Print the results of one part on every set of images."""
  head, rows = [''], {label: [label] for label in PARTS[part]}
  for data in DATA:
    head += [f'{data}: top-1 %', 'loss', 'calibration error']
    head += ['training TFLOP'] * (part == 'growth')
    for label, name in PARTS[part].items():
      lines = evaluations(out / data / name)
      if not lines:
        rows[label] += ['–'] * (3 + (part == 'growth'))
        continue
      rows[label].append(trials.spread((100 * line['eval/accuracy'] for line in lines), digits=2))
      for figure in ('loss', 'calibration_error'):
        rows[label].append(trials.spread(line[f'eval/{figure}'] for line in lines))
      if part == 'growth':
        rows[label].append(f'{training_flops(out, data, name) / 1e12:.1f}')
      if len(lines) < SEEDS:
        rows[label][-1] += f' ({len(lines)} seeds)'
  print(f'\n{part}:\n')
  trials.table([head, *rows.values()])


@styled()
def draw(out: Path, path: Path) -> None:
  """Draw the loss of every run: a row for each set of images, a panel for each part."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, all_axes = plt.subplots(
    len(DATA),
    len(PARTS),
    figsize=(13, 5.5),
    sharey='row',
    squeeze=False,
  )
  for data, row in zip(DATA, all_axes, strict=True):
    for (part, arms), axes in zip(PARTS.items(), row, strict=True):
      for x, name in enumerate(arms.values()):
        losses = [line['eval/loss'] for line in evaluations(out / data / name)]
        axes.plot([x] * len(losses), losses, 'o', alpha=0.5, ms=5)
        if losses:
          axes.plot([x - 0.25, x + 0.25], [statistics.mean(losses)] * 2, color='black', lw=1)
      # A label with the score function in parentheses becomes the function's name.
      labels = [label.partition('(')[2].rstrip(')') or label.replace(', ', ',\n') for label in arms]
      axes.set_xticks(range(len(arms)), labels, fontsize=7)
      axes.set_xlim(-0.6, len(arms) - 0.4)
      axes.set_title(f'{part}, {data}', fontsize=9)
      axes.grid(visible=False, axis='x')
    row[0].set_ylabel('loss, held out')
  figure.savefig(path)


def main() -> None:
  """Run the parts."""
  parser = trials.parser(__doc__.splitlines()[0], list(PARTS))
  parser.set_defaults(seeds=','.join(map(str, range(SEEDS))))
  parser.add_argument('--data', default=','.join(DATA))
  parser.add_argument('--picture', type=Path)
  args, out, chosen, seeds = trials.begin(parser, list(PARTS))
  tfds.disable_progress_bar()
  tfds.core.add_data_dir(out.absolute() / 'tfds')
  builder = cluttered_digits.Cluttered(data_dir=out.absolute() / 'tfds', file_format='array_record')
  builder.download_and_prepare()
  # Finish one seed after the other, so that an interrupted experiment has complete seeds.
  for seed in seeds:
    for data in args.data.split(','):
      for part in chosen:
        plan = Plan(out, data)
        if part == 'growth':
          plan.growth(seed)
        else:
          for name in PARTS[part].values():
            plan.arm(name, seed)
  for data in DATA:
    report_rates(out, data)
  for part in PARTS:
    compare(out, part)
  if args.picture:
    draw(out, args.picture)


if __name__ == '__main__':
  main()
