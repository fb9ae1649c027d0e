r"""Replicate, at small scale, a growth that others measured over two decades of compute.

  python experiments/replication.py --predict           the predictions, once, before any run

Chen et al. 2026 (arXiv 2609.19107) have a prelude, a core and a coda of as many layers each, and go
on with the core twice, and then four times, each with its own parameters: c1 c2 → c1 c2 c1 c2 by
whole copies. Alone this was worth 1.09 times the compute at 1e18 FLOPs, and 1.16 times at 1e20.

Here a prelude, two cores and a coda of one Pattention layer each (START) grow to four cores (END)
at a share of the tokens, on the text of the Python standard library with its tests, byte by byte.
All sizes have heads of 32 and see MAIN tokens for each parameter of the layers of END.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.laws.mixing import TYPICAL
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete

START, END = 'pre core*2 coda', 'pre core*4 coda'
MAIN, LENGTHS = 16, (8, 12, 16, 20)  # tokens for each parameter of the layers of END
SHARES = (0.46, 0.7)  # of the tokens before growth; the second one at the two smallest sizes alone
TOKENS = 512  # of a step
PREDICTED = Path(__file__).with_name('replication_predicted.json')
PUBLISHED = {1e18: 1.09, 1e20: 1.16}  # multipliers of compute


@dataclasses.dataclass(frozen=True)
class Size:
  """A size: its width, the tokens of a projection, its learning rate, and what is tried with it.

  A feed-forward part has four times as many tokens. `rates` are factors of the rate.
  """

  width: int
  tokens: int
  rate: float
  rates: tuple[float, ...] = (1.0, 2.0, 0.5)
  seeds: int = 5
  shares: tuple[float, ...] = SHARES[:1]

  @property
  def parameters(self) -> int:
    """The parameters of the layers of END, without norms and biases."""
    return 6 * 16 * self.width * self.tokens


SIZES = {
  '0.13M': Size(32, 43, 2e-3, shares=SHARES),
  '0.26M': Size(64, 43, 1.4e-3, shares=SHARES),
  '0.5M': Size(64, 85, 1e-3),
  '1M': Size(96, 114, 7e-4, (1.0, 0.5), 3),
  '2M': Size(128, 171, 5e-4, (1.0,), 1),
}


def config(name: str, shape: str, source: str = 'stdlib', **changes: Any) -> Config:
  """Return the config of a shape; two underscores in the name of a change stand for a dot."""
  size, c = SIZES[name], config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern, c.model.variants = shape, {'pre': {}, 'core': {}, 'coda': {}}
  c.model.width, mixer.heads = size.width, size.width // 32
  mixer.qkv.tokens = mixer.proj.tokens = size.tokens
  layer.ffn.tokens = 4 * size.tokens
  # Values a quarter as large as by default suit short runs.
  c.model.init.std, c.model.init.output_std = 0.1, 0.1 / size.width**0.5
  mixer.positions.fraction = 1.0
  c.data.update(source=source, tokenizer='bytes', sequence_length=64, batch_size=TOKENS // 64)
  c.data.validation_fraction = 0.01
  c.optim.update(warmup_steps=50, new_token_warmup=100)
  c.train.update(loss_chunk=64, trackers=())
  dotted = {key.replace('__', '.'): value for key, value in changes.items()}
  return config_lib.resolve(c, config_lib.from_dotted(dotted))


def token_flops(name: str, shape: str) -> float:
  """Return the FLOPs of a token in training."""
  made = complete(config(name, shape))
  return flops.train_flops(made.model, made.data.sequence_length)


def multiplier_by_law(ratio: float, share: float, kappa: float) -> float:
  """Return the compute of a plain model for that of a grown one at equal loss, by the law.

  What is left of the gap between both sizes is share^γ, and κ is that gap in the logs of compute.
  """
  return math.exp(-kappa * share**TYPICAL) / (1 - share * (1 - 1 / ratio))


def predict() -> None:
  """Write what is expected of each size."""
  if PREDICTED.exists():
    raise SystemExit(f'{PREDICTED.name} has predictions already; a prediction is made once')
  slope = math.log(PUBLISHED[1e20] / PUBLISHED[1e18]) / 2
  figures = []
  for name, size in SIZES.items():
    start, end = (token_flops(name, shape) for shape in (START, END))
    for share in size.shares:
      compute = MAIN * size.parameters * (share * start + (1 - share) * end)
      ratio = end / start
      old, new = (multiplier_by_law(ratio, share, x) for x in (1.3, 1.09 * math.log(ratio)))
      published = PUBLISHED[1e18] * math.exp(slope * math.log10(compute / 1e18))
      line = {'size': name, 'share': share, 'flops': compute, 'flops_ratio': ratio}
      line |= {'kappa_1.3': old, 'kappa_1.09_ln_r': new, 'published_line_continued': published}
      figures.append({k: v if isinstance(v, str) else float(f'{v:.4g}') for k, v in line.items()})
  expected = {
    'multiplier_of_compute': figures,
    'published_saving': [0.08, 0.14],
    'expected_error_of_the_level': 0.03,
    'published_slope_of_its_log_a_decade': float(f'{slope:.3g}'),
    'expected_error_of_the_slope': 0.05,
    'expected': 'kappa_1.09_ln_r at the share 0.46, and no slope, both within their errors',
    'exact_against_whole_copies': 'equal within 0.01 bits a byte at every size',
    'transferred_recipe': 'the best plain rate costs less than 0.01 bits a byte',
    'not_scored': {f'{compute:g}': value for compute, value in PUBLISHED.items()},
  }
  PREDICTED.write_text(json.dumps(expected, indent=2) + '\n')


def main() -> None:
  """Predict."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--predict', action='store_true')
  if parser.parse_args().predict:
    predict()


if __name__ == '__main__':
  main()
