r"""Measure whether growing a trained TokenFormer is worth it, with small models on a CPU.

  python experiments/growth.py --out=runs/growth              everything; continues where it stopped
  python experiments/growth.py --out=runs/growth --parts=handover --seeds=0,1
  python experiments/growth_report.py runs/growth docs        tables and pictures of finished runs

Parts, after the TokenFormer paper (arXiv 2410.23168):

  rates       the peak learning rate of each kind of model, for the other parts (seed 0)
  scaling     a model grown twice, against models from scratch at each size (Figures 3, 4 and 7)
  handover    the first steps after growth, by method, moments and learning rate (Figure 7, Table 8)
  taming      ways to start new tokens
  forgetting  growth for another corpus, with old tokens trained, scaled or frozen (Figure 6)

Every run calls `tokenformer_jax.train` with a config, and grows by `config.init_from`.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.training import sizes

BASE_STEPS, STAGE_STEPS, HANDOVER_STEPS, FORGETTING_STEPS = 1000, 500, 200, 300
# By size, in units of the base model: the width at which a Transformer has as many parameters in
# its blocks as the TokenFormer. Its heads are 8 wide, like the TokenFormer's.
TRANSFORMER_WIDTHS = {1: 72, 2: 104, 4: 144}
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
KINDS = ('tokenformer', 'transformer')


@dataclasses.dataclass(frozen=True)
class Plan:
  """The directory of the runs, and the best peak rates."""

  out: Path
  rates: dict[str, float]

  def config(self, kind: str, size: int, seed: int, steps: int, **changes) -> Config:
    """Return a run's config; two underscores in the name of a change stand for a dot."""
    c = config_lib.defaults()
    layer, mixer = c.model.layer, c.model.layer.mixer
    c.model.pattern, c.model.width, mixer.heads = 'layer*2', 64, 8
    mixer.qkv.tokens = mixer.proj.tokens = 64 * size
    layer.ffn.tokens = 256 * size
    if kind == 'transformer':
      width = TRANSFORMER_WIDTHS[size]
      c.model.width, mixer.heads, layer.norm = width, width // 8, 'affine'
      mixer.qkv = mixer.proj = {'kind': 'dense'}
      layer.ffn = {'kind': 'mlp'}
    mixer.positions.fraction, c.model.init.std = 1.0, 0.1
    c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
    c.optim.update(learning_rate=self.rates[kind], warmup_steps=30, final_fraction=0.1)
    c.optim.new_token_warmup = 0  # `taming` sets it itself.
    c.train.update(
      steps=steps,
      seed=seed,
      log_every=100,
      eval_every=100,
      eval_batches=16,
      checkpoint_every=10**9,
      keep_checkpoints=1,
      sample_tokens=0,
      loss_chunk=64,
      tensorboard=False,
    )
    c.update_from_flattened_dict({k.replace('__', '.'): v for k, v in changes.items()})
    return config_lib.resolve(c)

  def run(self, name: str, config: Config) -> Path:
    """Train, unless the run is done; return the work directory."""
    return trials.once(self.out, name, config)

  def base(self, kind: str, seed: int) -> Path:
    """Return the run of the model that grows."""
    config = self.config(kind, 1, seed, BASE_STEPS)
    return self.run(f'base/{kind}/{seed}', config)


def rates(plan: Plan) -> None:
  """Run a short training at each rate."""
  for kind in KINDS:
    for rate in RATES:
      config = plan.config(kind, 1, 0, 300, optim__learning_rate=rate)
      plan.run(f'rates/{kind}/{rate:g}', config)


def best_rates(out: Path) -> dict[str, float]:
  """Return the rate of `rates` with the least final loss, for each kind of model."""

  def loss(kind: str, rate: float) -> float:
    lines = (out / f'rates/{kind}/{rate:g}/metrics.jsonl').read_text().splitlines()
    return [json.loads(line)['eval/loss'] for line in lines if 'eval/loss' in line][-1]

  return {kind: min(RATES, key=lambda rate: loss(kind, rate)) for kind in KINDS}


def step_flops(config: Config) -> float:
  """Return the model FLOPs of one step of a run."""
  data = config.data
  model = sizes.fill_in(config).model
  return data.batch_size * data.sequence_length * flops.train_flops(model, data.sequence_length)


def scaling(plan: Plan, seed: int) -> None:
  """Grow ×2 twice, and train each size from scratch with as many FLOPs."""
  stages = {
    'zero_keys': ('tokenformer', {}),
    'duplicate': ('tokenformer', {'grow__method': 'duplicate', 'grow__noise': 0.1}),
    'released': ('tokenformer', {'grow__method': 'random', 'grow__moments': 'drop'}),
    'net2net_fill': ('transformer', {'grow__method': 'net2net_fill', 'grow__moments': 'drop'}),
  }
  spent = {}
  for name, (kind, changes) in stages.items():
    source, total = plan.base(kind, seed), BASE_STEPS * step_flops(plan.config(kind, 1, 0, 1))
    spent[kind, 1] = total
    for stage, size in enumerate((2, 4), start=1):
      steps = BASE_STEPS + stage * STAGE_STEPS
      config = plan.config(kind, size, seed, steps, init_from=str(source), **changes)
      source = plan.run(f'scaling/{name}/{size}/{seed}', config)
      total += STAGE_STEPS * step_flops(config)
      spent[kind, size] = total
  for kind in KINDS:
    for size in (2, 4):
      steps = round(spent[kind, size] / step_flops(plan.config(kind, size, 0, 1)))
      plan.run(f'scaling/scratch_{kind}/{size}/{seed}', plan.config(kind, size, seed, steps))


TWICE_THE_SCALE = {
  'model__layer__mixer__qkv__reference': 128,
  'model__layer__mixer__proj__reference': 128,
  'model__layer__ffn__reference': 512,
}
HANDOVER = {
  'not grown': ('tokenformer', 1, {}),
  'scale only': ('tokenformer', 1, TWICE_THE_SCALE),  # τ of the grown model
  'zero_keys': ('tokenformer', 2, {'grow__method': 'zero_keys'}),
  'duplicate': ('tokenformer', 2, {'grow__method': 'duplicate', 'grow__noise': 0.01}),
  'random': ('tokenformer', 2, {'grow__method': 'random'}),
  'Transformer, not grown': ('transformer', 1, {}),
  'net2net': ('transformer', 4, {'grow__method': 'net2net', 'grow__noise': 0.01}),
  'net2net_fill': ('transformer', 4, {'grow__method': 'net2net_fill'}),
  'hypercloning': ('transformer', 4, {'grow__method': 'hypercloning', 'grow__noise': 0.01}),
}


def handover(plan: Plan, seed: int) -> None:
  """Train the first steps after growth."""
  for name, (kind, size, changes) in HANDOVER.items():
    for moments in ('pad', 'drop'):
      for level, factor in (('low', 0.1), ('peak', 1.0)):
        config = plan.config(
          kind,
          size,
          seed,
          BASE_STEPS + HANDOVER_STEPS,
          init_from=str(plan.base(kind, seed)),
          grow__moments=moments,
          optim__learning_rate=plan.rates[kind] * factor,
          optim__schedule='constant',
          optim__warmup_steps=0,
          train__eval_every=20,
          **changes,
        )
        plan.run(f'handover/{name}/{moments}/{level}/{seed}', config)


TAMING = {
  'as it is': {},
  'bias correction': {'optim__new_token_correction': True},
  'warm-up 20': {'optim__new_token_warmup': 20},
  'warm-up 100': {'optim__new_token_warmup': 100},
}


def taming(plan: Plan, seed: int) -> None:
  """Compare ways to limit the first updates of new tokens, with zero keys and kept moments."""
  for name, changes in TAMING.items():
    for level, factor in (('low', 0.1), ('peak', 1.0)):
      config = plan.config(
        'tokenformer',
        2,
        seed,
        BASE_STEPS + HANDOVER_STEPS,
        init_from=str(plan.base('tokenformer', seed)),
        optim__learning_rate=plan.rates['tokenformer'] * factor,
        optim__schedule='constant',
        optim__warmup_steps=0,
        train__eval_every=20,
        **changes,
      )
      plan.run(f'taming/{name}/{level}/{seed}', config)


def forgetting(plan: Plan, seed: int) -> None:
  """Train on other text, and measure the loss on the old text before and after."""
  source = f'files:{write_second_corpus(plan.out)}/*.txt'
  base = plan.base('tokenformer', seed)
  arms = {'not grown': (1, 'train'), 'train': (2, 'train'), 'scale:0.1': (2, 'scale:0.1')}
  arms['freeze'] = (2, 'freeze')
  for name, (size, old_tokens) in arms.items():
    steps = BASE_STEPS + FORGETTING_STEPS
    changes = {'init_from': str(base), 'optim__old_tokens': old_tokens}
    config = plan.config('tokenformer', size, seed, steps, data__source=source, **changes)
    new = plan.run(f'forgetting/{name}/{seed}', config)
    # A step at rate 0 on the old text yields its evaluation.
    back = plan.config(
      'tokenformer',
      size,
      seed,
      steps + 1,
      init_from=str(new),
      optim__learning_rate=1e-30,
      optim__weight_decay=0.0,
    )
    plan.run(f'forgetting/{name} on the old text/{seed}', back)


def write_second_corpus(out: Path) -> Path:
  """Write English prose: Python's language reference for `help`, with a file for each topic."""
  from pydoc_data import topics  # noqa: PLC0415 (needed for this part only)

  folder = out / 'corpus'
  if not folder.exists():
    temporary = out / 'corpus.partial'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, text in topics.topics.items():
      (temporary / f'{name}.txt').write_text(text)
    temporary.rename(folder)
  return folder


def main() -> None:
  """Run the parts."""
  names = ('rates', 'scaling', 'handover', 'taming', 'forgetting')
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', required=True)
  parser.add_argument('--parts', default=','.join(names))
  parser.add_argument('--seeds', default='0,1,2')
  args = parser.parse_args()
  parts = args.parts.split(',')
  if unknown := set(parts) - set(names):
    parser.error(f'unknown parts {", ".join(unknown)}; there are {", ".join(names)}')
  out = Path(args.out)
  # Most runs share their programs with runs of other seeds or methods.
  jax.config.update('jax_compilation_cache_dir', str((out / 'compiled').absolute()))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  rates(Plan(out, dict.fromkeys(KINDS, RATES[0])))
  plan = Plan(out, best_rates(out))
  (out / 'rates.json').write_text(json.dumps(plan.rates))
  by_name = {f.__name__: f for f in (scaling, handover, taming, forgetting)}
  # Finish one seed after the other, so that an interrupted experiment has complete seeds.
  for seed in args.seeds.split(','):
    for part in parts:
      if part in by_name:
        by_name[part](plan, int(seed))


if __name__ == '__main__':
  main()
