r"""Measure what experts are worth: Switch, DeepSeekMoE and sparse Pattention against dense models.

  python experiments/experts.py --out=runs/experts            everything; goes on where it stopped
  python experiments/experts.py --out=runs/experts --parts=quality,balance --seeds=0
  python experiments/experts_report.py runs/experts docs      tables and pictures of finished runs

Byte language models on the text of the Python standard library, of 2 layers. Every run ends with a
decay of the rate to zero. Parts:

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.training import sizes

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
  """The runs of one seed.

  Attributes:
    out: the folder of all runs.
    seed: the seed.
  """

  out: Path
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
    c.optim.update(learning_rate=RATE, schedule='wsd', warmup_steps=50)
    c.train.update(steps=steps, seed=self.seed, log_every=100, eval_every=0, eval_batches=64)
    c.train.update(checkpoint_every=10**9, sample_tokens=0, loss_chunk=64, trackers=())
    changes = dict(changes) | {name.replace('__', '.'): value for name, value in more.items()}
    c.update_from_flattened_dict(changes)
    if c.optim.schedule.kind == 'wsd':
      c.optim.schedule.final_fraction = 0.0
    return config_lib.resolve(c)

  def run(self, name: str, config: Config) -> Path:
    """Train, unless the run is done; return the work directory."""
    return trials.once(self.out, f'{name}/{self.seed}', config)

  def growth(self) -> None:
    """Train a dense TokenFormer at a constant rate, and go on in several ways with equal FLOPs."""
    stable = self.run(
      'growth/stable',
      self.config(TOKENFORMER, GROWN_AT, optim__schedule='constant', train__keep_checkpoints=9),
    )
    spent = (STEPS * 2 - GROWN_AT) * flops.step_flops(sizes.fill_in(self.config(TOKENFORMER)))
    for name, changes in grown().items():
      per_step = flops.step_flops(sizes.fill_in(self.config(changes)))
      steps = GROWN_AT + round(spent / per_step)
      config = self.config(
        changes,
        steps,
        init_from=str(stable),
        train__decay_from=GROWN_AT + round(0.7 * (steps - GROWN_AT)),
        optim__learning_rate=RATE * (1 if name == 'no growth' else 0.5),
        grow__method='group',
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
  "with the teacher's probabilities": {'weight': 0.25, 'init': 'no'},
  "begun with the teacher's other weights": {'weight': 0.0, 'init': 'yes'},
  'both': {'weight': 0.25, 'init': 'yes'},
}
PARTS = {
  'quality': QUALITY,
  'balance': BALANCE,
  'drops': DROPS,
  'precision': PRECISION,
  'init': INIT,
}


def main() -> None:
  """Run the parts."""
  names = (*PARTS, 'growth', 'distillation')
  parser = trials.parser(__doc__.splitlines()[0], names)
  _, out, parts, seeds = trials.begin(parser, names)
  for seed in seeds:
    trial = Trial(out, seed)
    for part in parts:
      for name, changes in PARTS.get(part, {}).items():
        trial.run(f'{part}/{name}', trial.config(changes))
      if part == 'growth':
        trial.growth()
      if part == 'distillation':
        trial.distillation()


if __name__ == '__main__':
  main()
