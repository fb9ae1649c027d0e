"""Grow a model for a new domain with and without replay, and measure what it forgets.

  python experiments/replay.py --out=runs/replay    # 20 minutes on two cores, shared

A byte language model of 2 layers learns the text of the Python standard library, then Python's
language reference. The second part has twice the parameter tokens, as a group, and a mixture of the
new text and some of the old. A source of weight 0 is only evaluated.
"""

import dataclasses
from pathlib import Path

import trials
from absl import app, flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, SourceConfig, Sources
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

_OUT = flags.DEFINE_string('out', 'runs/replay', 'The folder of the runs.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'The number of seeds.')

FIRST, SECOND = 600, 200  # steps on the old text, and on the mixture
REPLAYED = (0.0, 0.1, 0.3)  # the share of the old text


def base_config(seed: int) -> Config:
  """Return the config of a run on the old text."""
  c = config_lib.defaults()
  c.model.pattern, c.model.width, c.model.layer.mixer.heads = 'layer*2', 64, 4
  for projection in (c.model.layer.mixer.qkv, c.model.layer.mixer.proj):
    projection.tokens = 64
  c.model.layer.ffn.tokens = 256
  c.data.tokenizer, c.data.sequence_length, c.data.batch_size = 'bytes', 128, 8
  c.optim.learning_rate, c.optim.schedule.kind = 3e-3, 'constant'
  c.train.steps, c.train.seed = FIRST, seed
  c.train.eval_every, c.train.eval_batches, c.train.sample_tokens = 0, 40, 0
  c.train.checkpoint_every, c.train.log_every, c.train.trackers = FIRST, 50, ()
  return config_lib.resolve(c)


def grown_config(old: Config, source: Path, new_text: str, replayed: float) -> Config:
  """Return the config of a grown run on the new text and a share of the old one."""
  sources = {
    'new': SourceConfig(source=new_text, weight=round(1 - replayed, 3)),
    'old': SourceConfig(source='stdlib', weight=replayed),
  }
  twice = {name: 2 * count for name, count in config_lib.token_counts(old.model).items()}
  return dataclasses.replace(
    old,
    model=config_lib.with_token_counts(old.model, twice),
    data=dataclasses.replace(old.data, mixture=Sources(sources)),
    train=dataclasses.replace(old.train, steps=FIRST + SECOND),
    init_from=str(source),
  )


def main(argv: list[str]) -> None:
  """Train all runs, and print the bits per byte of both texts."""
  del argv
  out = Path(_OUT.value)
  new_text = f'files:{trials.write_second_corpus(out)}/*.txt'
  losses: dict[float, list[tuple[float, float]]] = {share: [] for share in REPLAYED}
  before = []
  for seed in range(_SEEDS.value):
    old, base = base_config(seed), out / f'base_{seed}'
    loop.train(old, base)
    before.append(metrics.read(base)[-1]['eval/bits_per_byte'])
    for share in REPLAYED:
      workdir = out / f'replay_{share}_{seed}'
      loop.train(grown_config(old, base, new_text, share), workdir)
      last = metrics.read(workdir)[-1]
      losses[share].append(tuple(last[f'eval/{name}/bits_per_byte'] for name in ('new', 'old')))
  print('| replay | new text | old text | forgotten | seeds |\n| --- | --- | --- | --- | --- |')
  for share, pairs in losses.items():
    new, after = zip(*pairs, strict=True)
    lost = [a - b for a, b in zip(after, before, strict=True)]
    shown = ' | '.join(map(trials.spread, (new, after, lost)))
    print(f'| {share:.0%} | {shown} | {len(pairs)} |')


if __name__ == '__main__':
  app.run(main)
