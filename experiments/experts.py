r"""Measure what experts are worth: Switch, DeepSeekMoE and sparse Pattention against dense models.

  python experiments/experts.py --out=runs/experts            everything; goes on where it stopped
  python experiments/experts.py --out=runs/experts --parts=quality,balance --seeds=0
  python experiments/experts.py --out=runs/experts --picture=docs/experts.png

Byte language models on the text of the Python standard library, of 2 layers. Every run ends with a
decay of the rate to zero. The command then prints the tables of docs/experts.md: bits per byte on
held-out text, as mean ± standard deviation over the finished seeds. Parts:

  quality       models of equal steps; DENSE has the FLOPs of the mixtures, WIDE their parameters
  balance       what keeps the load even: nothing, a loss, a bias
  drops         the same with a capacity of 1.25, beyond which tokens are dropped
  precision     bfloat16 activations, with the router in float32 and in bfloat16
  init          initial values by √(s / fan in), s = 1 and 0.1, at a high rate
  growth        a trained dense TokenFormer that goes on with routed experts of parameter tokens,
                against growth by dense groups: of equal FLOPs, and of equal parameters
  distillation  a dense model that learns from a mixture
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops, models
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import metrics
from tokenformer_jax.runs.pictures import styled

WIDTH, HIDDEN, EXPERTS = 32, 128, 8
STEPS = 1500
RATE = 4e-3
GROWN_AT = 1200  # steps of the stable run; all in all it has the FLOPs of twice STEPS
Changes = Mapping[str, Any]

FFN = 'model.layer.ffn.'


def mixture(
  count: int, width: int, top_k: int, shared: int = 0, capacity: float = 0, **more: Any
) -> dict[str, Any]:
  """Return the keys of experts that are MLPs of a width, of which a token has `top_k`."""
  changes = {
    'kind': 'experts',
    'count': count,
    'expert.width': width,
    'expert.activation': 'relu',
    'router.top_k': top_k,
    **more,
  }
  if shared:
    changes |= {'shared.kind': 'mlp', 'shared.width': shared, 'shared.activation': 'relu'}
  if capacity:
    changes |= {'dispatch.kind': 'capacity', 'dispatch.factor': capacity}
  return {FFN + name: value for name, value in changes.items()}


def mlp(width: int) -> dict[str, Any]:
  """Return the keys of a dense MLP."""
  return {FFN + 'kind': 'mlp', FFN + 'width': width, FFN + 'activation': 'relu'}


def tokens(shared: int, expert: int, top_k: int = 1) -> dict[str, Any]:
  """Return the keys of a TokenFormer whose feed-forward part is shared and routed tokens."""
  changes = MIXER | {FFN + 'kind': 'experts', FFN + 'count': EXPERTS}
  changes |= {FFN + 'shared.kind': 'pattention', FFN + 'shared.tokens': shared}
  changes |= {FFN + 'expert.kind': 'pattention', FFN + 'expert.tokens': expert}
  return changes | {FFN + 'router.top_k': top_k}


_MIXER = 'model.layer.mixer.'
MIXER = {
  f'{_MIXER}qkv.kind': 'pattention',
  f'{_MIXER}qkv.tokens': WIDTH,
  f'{_MIXER}proj.kind': 'pattention',
  f'{_MIXER}proj.tokens': WIDTH,
  'model.layer.norm': 'plain',
}
TOKENFORMER = MIXER | {FFN + 'kind': 'pattention', FFN + 'tokens': HIDDEN}

_BF16, _SWITCH = {'dtype': 'bfloat16'}, mixture(EXPERTS, HIDDEN, 1, capacity=1.25)
QUALITY = {
  'dense': mlp(HIDDEN),
  'dense, 8 times as wide': mlp(EXPERTS * HIDDEN),
  'Switch, capacity 1.0': mixture(EXPERTS, HIDDEN, 1, capacity=1.0),
  'Switch, capacity 1.25': _SWITCH,
  'Switch, capacity 2.0': mixture(EXPERTS, HIDDEN, 1, capacity=2.0),
  'no drops, 1 of 8': mixture(EXPERTS, HIDDEN, 1),
  'fine-grained, 4 of 32': mixture(4 * EXPERTS, HIDDEN // 4, 4),
  'DeepSeekMoE, 1 + 3 of 31': mixture(4 * EXPERTS - 1, HIDDEN // 4, 3, shared=HIDDEN // 4),
  'TokenFormer': TOKENFORMER,
  'sparse Pattention, 64 + 64 of 512': tokens(HIDDEN // 2, HIDDEN // 2),
}
_FINE = {'count': 4 * EXPERTS, 'width': HIDDEN // 4, 'top_k': 4}
BALANCE = {
  'nothing': mixture(**_FINE, **{'balance.kind': 'none'}),
  'loss, 0.01': mixture(**_FINE),
  'loss, 0.001': mixture(**_FINE, **{'balance.weight': 0.001}),
  'bias, 0.001': mixture(**_FINE, **{'balance.kind': 'bias', 'router.gates': 'sigmoid'}),
  'bias, 0.01': mixture(
    **_FINE,
    **{'balance.kind': 'bias', 'balance.rate': 0.01, 'router.gates': 'sigmoid'},
  ),
}
DROPS = {
  name: changes | {FFN + 'dispatch.kind': 'capacity', FFN + 'dispatch.factor': 1.25}
  for name, changes in BALANCE.items()
}
PRECISION = {
  'router in float32': _SWITCH | _BF16,
  'router in bfloat16': _SWITCH | _BF16 | {FFN + 'router.dtype': 'bfloat16'},
}


def _initial(scale: float) -> dict[str, Any]:
  """Return the keys of initial values by √(scale / fan in), at four times the rate."""
  return {
    'model.init.std': math.sqrt(scale / WIDTH),
    'model.init.output_std': math.sqrt(scale / HIDDEN),
    'optim.learning_rate': 4 * RATE,
  }


INIT = {f's = {scale}': _SWITCH | _initial(scale) for scale in (1.0, 0.1)}


@dataclasses.dataclass(frozen=True)
class Trial:
  """The runs of one seed."""

  out: Path  # the folder of all runs
  seed: int

  def config(self, changes: Changes, steps: int = STEPS, **more: Any) -> Config:
    """Return a run's config; two underscores in the name of a keyword stand for a dot."""
    c = config_lib.defaults()
    layer, mixer = c.model.layer, c.model.layer.mixer
    c.model.pattern, c.model.width, mixer.heads = 'layer*2', WIDTH, WIDTH // 8
    mixer.qkv = mixer.proj = {'kind': 'dense'}
    layer.norm, mixer.positions.fraction, c.model.init.std = 'affine', 1.0, 0.1
    c.model.init.output_std = 0.5 / (2 * WIDTH**0.5)
    c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
    c.optim.update(learning_rate=RATE, warmup_steps=50)
    c.optim.schedule = {'kind': 'wsd', 'final_fraction': 0.0}
    c.train.update(steps=steps, seed=self.seed, log_every=100, eval_every=0, eval_batches=64)
    c.train.update(checkpoint_every=10**9, sample_tokens=0, loss_chunk=64, trackers=())
    changes = dict(changes) | {name.replace('__', '.'): value for name, value in more.items()}
    return config_lib.resolve(c, config_lib.from_dotted(changes))

  def run(self, name: str, config: Config) -> Path:
    """Train, unless the run is done; return the work directory."""
    return trials.once(self.out, f'{name}/{self.seed}', config)

  def growth(self) -> None:
    """Train a dense TokenFormer at a constant rate, and go on in several ways with equal FLOPs."""
    stable = self.run(
      'growth/stable',
      self.config(TOKENFORMER, GROWN_AT, optim__schedule={'kind': 'constant'}),
    )
    spent = (STEPS * 2 - GROWN_AT) * flops.step_flops(complete(self.config(TOKENFORMER)))
    for name, changes in grown().items():
      per_step = flops.step_flops(complete(self.config(changes)))
      steps = GROWN_AT + round(spent / per_step)
      config = self.config(
        changes,
        steps,
        init_from=str(stable),
        train__decay_from=GROWN_AT + round(0.7 * (steps - GROWN_AT)),
        optim__learning_rate=RATE * (1 if name == 'no growth' else 0.5),
        optim__new_token_warmup=50,
      )
      self.run(f'growth/{name}', config)

  def distillation(self) -> None:
    """Train a mixture, and dense students of it."""
    teacher = self.run('distillation/teacher', self.config(QUALITY['no drops, 1 of 8'], 3 * STEPS))
    for name, how in STUDENTS.items():
      keys = {f'distill.{key}': value for key, value in how.items()}
      if keys:
        keys['distill.teacher'] = str(teacher)
      self.run(f'distillation/{name}', self.config(QUALITY['dense'] | keys))


def grown() -> dict[str, Changes]:
  """Return the models that a dense TokenFormer grows into."""
  routed = tokens(HIDDEN, HIDDEN)
  return {
    'no growth': TOKENFORMER,
    'routed: 128 + 128 of 1024': routed,
    'dense: 128 + 1024 (equal parameters)': TOKENFORMER
    | {FFN + 'tokens': 9 * HIDDEN, FFN + 'groups': f'{HIDDEN}:{HIDDEN} {8 * HIDDEN}:{8 * HIDDEN}'},
    'dense: 128 + 128 (equal FLOPs a token)': TOKENFORMER
    | {FFN + 'tokens': 2 * HIDDEN, FFN + 'groups': f'{HIDDEN}:{HIDDEN} {HIDDEN}:{HIDDEN}'},
  }


STUDENTS = {
  'alone': {},
  "with the teacher's probabilities": {'weight': 0.25},
}
PARTS = {
  'quality': QUALITY,
  'balance': BALANCE,
  'drops': DROPS,
  'precision': PRECISION,
  'init': INIT,
}


Lines = list[dict[str, float]]


def runs(folder: Path) -> list[Lines]:
  """Return the figures of each finished seed of a trial."""
  return [metrics.read(run) for run in trials.finished(folder)]


def last(finished: list[Lines], name: str = 'eval/bits_per_byte') -> list[float]:
  """Return the last value of a figure of each run that has it."""
  values = ([line[name] for line in lines if line.get(name) is not None] for lines in finished)
  return [each[-1] for each in values if each]


def size(changes: Changes) -> list[str]:
  """Return the parameters, those of one token, and the training FLOPs of one token."""
  config = complete(Trial(Path(), 0).config(changes))
  definition = models.define(config.model)
  per_token = flops.train_flops(config.model, config.data.sequence_length)
  return [f'{definition.count:,}', f'{definition.active:,}', f'{per_token / 1e3:,.0f}']


def plain(out: Path, part: str) -> None:
  """Print the losses of a part, with the sizes of its models."""
  rows = [['', 'parameters', 'of one token', 'kFLOP a token', 'bits a byte', 'dropped', 'seeds']]
  for name, changes in PARTS[part].items():
    if finished := runs(out / part / name):
      dropped = last(finished, 'eval/router/dropped')
      share = f'{100 * statistics.mean(dropped):.1f} %' if dropped else ''
      rows.append([name, *size(changes), trials.spread(last(finished)), share, str(len(finished))])
  trials.table(rows)


def balance(out: Path) -> None:
  """Print how uneven the load is over time: the largest load above the mean, in means."""
  steps = [100, 300, 700, STEPS]
  rows = [['', *(f'step {step}' for step in steps), 'entropy', 'bits a byte', 'seeds']]
  for name in BALANCE:
    if finished := runs(out / 'balance' / name):
      at = []
      for step in steps:
        here = [line for lines in finished for line in lines if line['step'] == step]
        at.append([x['train/router/max_violation'] for x in here if 'train/loss' in x])
      values = [trials.spread(runs, 2) for runs in (*at, last(finished, 'train/router/entropy'))]
      rows.append([name, *values, trials.spread(last(finished)), str(len(finished))])
  trials.table(rows)


def drops(out: Path) -> None:
  """Print the share of choices without a place over time, in training."""
  steps = [100, 300, 700, STEPS]
  rows = [['dropped in training', *(f'step {step}' for step in steps)]]
  parts = (('quality', QUALITY), ('drops', DROPS))
  for part, name in ((part, name) for part, names in parts for name in names):
    at = [
      [
        100 * line['train/router/dropped']
        for lines in runs(out / part / name)
        for line in lines
        if line['step'] == step and 'train/router/dropped' in line
      ]
      for step in steps
    ]
    if all(at) and any(map(any, at)):
      rows.append([name, *(f'{trials.spread(runs, 1)} %' for runs in at)])
  trials.table(rows)


def report_growth(out: Path) -> None:
  """Print the losses of the ways to go on with a trained model."""
  rows = [['', 'parameters', 'of one token', 'kFLOP a token', 'bits a byte', 'seeds']]
  for name, changes in grown().items():
    if finished := runs(out / 'growth' / name):
      rows.append([name, *size(changes), trials.spread(last(finished)), str(len(finished))])
  trials.table(rows)


def report_distillation(out: Path) -> None:
  """Print the losses of students, and how much of the teacher's lead they keep."""
  rows = [['', 'bits a byte', 'share of the lead kept', 'seeds']]
  of = {name: last(runs(out / 'distillation' / name)) for name in STUDENTS}
  teacher = last(runs(out / 'distillation' / 'teacher'))
  if not teacher:
    return
  rows.append(['the teacher', trials.spread(teacher), '', str(len(teacher))])
  for name, values in of.items():
    pairs = zip(values, of['alone'], teacher, strict=False)
    kept = [(alone - own) / (alone - best) for own, alone, best in pairs]
    share = f'{100 * statistics.mean(kept):.0f} %' if kept and name != 'alone' else ''
    rows.append([name, trials.spread(values), share, str(len(values))])
  trials.table(rows)


@styled()
def draw(out: Path, path: Path) -> None:
  """Draw the loss against steps and against FLOPs, and the balance over time."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, (by_step, by_flops, load) = plt.subplots(1, 3, figsize=(15, 4.4))
  for name, changes in QUALITY.items():
    finished = runs(out / 'quality' / name)
    if not finished:
      continue
    config = complete(Trial(Path(), 0).config(changes))
    lines = [[line for line in run if 'train/bits_per_byte' in line] for run in finished]
    steps = [line['step'] for line in lines[0]]
    mean = [
      statistics.mean(line['train/bits_per_byte'] for line in at) for at in zip(*lines, strict=True)
    ]
    by_step.plot(steps, mean, label=name)
    by_flops.plot([step * flops.step_flops(config) / 1e9 for step in steps], mean)
  for name in BALANCE:
    if finished := runs(out / 'balance' / name):
      lines = [line for line in finished[0] if 'train/router/max_violation' in line]
      load.plot([x['step'] for x in lines], [x['train/router/max_violation'] for x in lines])
      load.lines[-1].set_label(name)
  by_step.set(xlabel='steps', ylabel='bits per byte, training', title='Loss against steps')
  by_flops.set(xlabel='GFLOP', xscale='log', title='The same against training FLOPs')
  load.set(xlabel='steps', title='Largest load above the mean, in means', yscale='log')
  by_step.set_ylim(top=3.6)
  by_flops.set_ylim(top=3.6)
  for axes in (by_step, load):
    axes.legend(fontsize=7)
  figure.savefig(path, dpi=110)


def main() -> None:
  """Run the parts."""
  names = (*PARTS, 'growth', 'distillation')
  parser = trials.parser(__doc__.splitlines()[0], names)
  parser.add_argument('--picture', type=Path)
  args, out, parts, seeds = trials.begin(parser, names)
  for seed in seeds:
    trial = Trial(out, seed)
    for part in parts:
      for name, changes in PARTS.get(part, {}).items():
        trial.run(f'{part}/{name}', trial.config(changes))
      if part == 'growth':
        trial.growth()
      if part == 'distillation':
        trial.distillation()
  for part in ('quality', 'precision', 'init'):
    plain(out, part)
  balance(out)
  drops(out)
  report_growth(out)
  report_distillation(out)
  if args.picture:
    draw(out, args.picture)


if __name__ == '__main__':
  main()
