"""Whether a growth pays: what it is expected to save, against what, and how sure that is.

A model trains on the share f of D tokens, grows to r times the FLOPs of a token, and ends with f^γ
of the gap between both sizes left (laws/mixing.py). The larger model from scratch closes the whole
gap by training e^κ times as long, so it has the loss of the grown one after D exp(−κ f^γ) tokens:

  saved = 1 − (1 − f (1 − 1/r)) exp(κ f^γ),   κ = a ln r (d/20)^b

d is D for each parameter of the larger model's layers. By Chinchilla's law κ is (r^α − 1)/α where a
size has the tokens that are best for it, and rises as D^β: so a is near 1, and b is β, 0.52 in
docs/laws.md. `experiments/will_it_pay.py` fits a and b, and leaves out one scale at a time.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.steps import experts, layers, tokens, widen
from tokenformer_jax.grow.steps.step import Step
from tokenformer_jax.model import flops
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.runs import batches
from tokenformer_jax.runs.checkpoint_meta import Meta

MIXING = 2.1  # γ, of growth to four times the parameters
SLOPE, LENGTH = 0.8, 0.5  # a (0.64 … 0.97; 1.13 at the largest of three scales), and b
SPREAD = 0.06  # of the log of the cost, over the growths of a scale that the fit has not seen
SURE = 1.96  # intervals are so many spreads wide to each side, and hold 95 %
# What was measured: the factor of one growth, tokens a parameter in all, shares before a growth.
FACTORS, TOKENS, SHARES = (1.5, 4.0), (5.0, 60.0), (0.1, 0.6)
SHARES_OF_A_FAMILY = (0.1, 0.78)
_USUAL = 20.0  # tokens a parameter
_SAME = 0.01  # relative; a value beyond a range by less is inside of it
_BY = 'a law of 756 runs of up to 0.5 million parameters; the largest saved least (docs/growth.md)'
IMAGES = 'the law is about text, and this is a model of images'
_OVERTRAINED = 'the more tokens before the growth, the less those after it do'
# Kinds of growth that were not measured at equal loss, or close less of the gap.
_UNMEASURED: dict[type[Step], str] = {
  experts.AddExperts: 'experts, whose active FLOPs do not say how far apart the two sizes are',
  tokens.DuplicateTokens: 'duplicate, which closes half of the gap',
  widen.CopyUnits: 'a larger width',
  widen.FillBlocks: 'a larger width',
  widen.AddNeurons: 'neurons of MLPs',
}


@dataclasses.dataclass(frozen=True)
class Leg:
  """A size on the way to the last one."""

  flops: float  # of training on one token
  tokens: float  # trained at this size
  parameters: float  # of the layers' matrices that one token uses


@dataclasses.dataclass(frozen=True)
class Payoff:
  """What a chain of sizes is expected to save at equal loss."""

  legs: Sequence[Leg]
  factors: Sequence[float]  # of the FLOPs of a token, in each growth
  shares: Sequence[float]  # of the tokens, before each growth
  tokens: float  # in all
  length: float  # the tokens in all for each parameter of the last size
  flops: float  # in all
  from_scratch: float  # the FLOPs with which the last size from scratch is as good
  outside: Sequence[str]  # why this is outside of what was measured

  @property
  def saved(self) -> float:
    """The share of the FLOPs that is saved of the last size from scratch."""
    return 1 - self.flops / self.from_scratch


def expect(
  legs: Sequence[Leg],
  unmeasured: Sequence[str] = (),
  measured_shares: tuple[float, float] = SHARES,
) -> Payoff:
  """Return what a chain of sizes is expected to save.

  `unmeasured` has reasons why a growth of this kind was not measured.
  """
  total = sum(leg.tokens for leg in legs)
  shares = [seen / total for seen in itertools.accumulate(leg.tokens for leg in legs[:-1])]
  factors = [after.flops / before.flops for before, after in itertools.pairwise(legs)]
  length = total / legs[-1].parameters
  slope = SLOPE * (length / _USUAL) ** LENGTH
  growths = zip(factors, shares, strict=True)
  behind = slope * sum(math.log(factor) * share**MIXING for factor, share in growths)
  flops_of_all = sum(leg.flops * leg.tokens for leg in legs)
  from_scratch = legs[-1].flops * total * math.exp(-behind)
  values = [(FACTORS, factor, '× the FLOPs of a token') for factor in factors]
  values += [(measured_shares, share, ' of the tokens before a growth') for share in shares]
  values.append((TOKENS, length, ' tokens a parameter'))
  outside = [*unmeasured]
  for (low, high), value, unit in values:
    if not low * (1 - _SAME) <= value <= high * (1 + _SAME):
      outside.append(f'{value:.2g}{unit}, where {low:g} to {high:g} were tried')
  if length < TOKENS[0] * (1 - _SAME):
    outside[-1] += ', and with fewer the smaller model trained on was as good or better'
  outside = [*dict.fromkeys(outside)]
  return Payoff(legs, factors, shares, total, length, flops_of_all, from_scratch, outside)


def interval(saved: float) -> tuple[float, float]:
  """Return the ends between which 95 % of such savings are expected."""
  low, high = (1 - (1 - saved) * math.exp(side * SURE * SPREAD) for side in (1, -1))
  return low, high


def percent(share: float) -> str:
  """Return a share in percent."""
  return f'{100 * share:.0f} %'.replace('-', '−')


def with_interval(saved: float) -> str:
  """Return an expected saving and its interval in percent."""
  low, high = (percent(end) for end in interval(saved))
  return f'{percent(saved)} ({low} … {high})'


def verdict(saved: float, outside: Sequence[str], other: str) -> str:
  """Return one sentence: whether a growth pays against another way, or why that is not known."""
  if outside:
    return f'will it pay? Outside of what was measured: {"; ".join(outside)}'
  text = f'it is expected to save {with_interval(saved)} of the FLOPs of {other} to the same loss'
  if saved <= 0:
    return f'will it pay? This will not pay: {text}'
  return f'will it pay? {"Yes" if interval(saved)[0] > 0 else "Perhaps"}: {text}'


def render(one: Payoff, until: str = '') -> str:
  """Return a sentence and a row for each figure; `until` says when the last tokens end."""
  first, last = one.legs[0], one.legs[-1]
  now = one.flops - first.flops * first.tokens
  finished = first.flops * (one.tokens - first.tokens)
  both = 1 - (one.flops + finished) / (one.from_scratch + first.flops * one.tokens)
  from_scratch, alone = (f'{one.flops / leg.flops:.3g}' for leg in (last, first))
  rows = [*_sizes(one, until)]
  if one.outside:
    rows.append(('the law alone', f'{percent(one.saved)} of the larger model from scratch'))
  else:
    rows += [
      ('saved', f'{with_interval(one.saved)} of the larger model from scratch'),
      ('', f'{with_interval(1 - now / one.from_scratch)} if the smaller one exists anyway'),
      ('', f'{with_interval(both)} of the two apart, if both are wanted (tokenformer family)'),
    ]
  rows += [
    ('at equal cost', f'{from_scratch} tokens of the larger model from scratch'),
    ('', f'{alone} tokens of the smaller one, as good at the smallest of three scales'),
    *_published(one),
  ]
  return f'{verdict(one.saved, one.outside, "the larger model from scratch")}\n{_table(rows)}'


def render_family(chains: Sequence[Sequence[Leg]], spent: float) -> str:
  """Return a sentence on sizes on one trunk, and a row for each figure behind it.

  `chains` has the sizes on the way to each size, the largest last, and `spent` is in FLOPs.
  """
  alone, largest = expect(chains[-1]), expect(chains[-1], (), SHARES_OF_A_FAMILY)
  saved = 1 - spent / sum(expect(chain).from_scratch for chain in chains)
  whole = sum(largest.tokens * chain[-1].flops for chain in chains)
  rows = [*_sizes(largest)]
  if largest.outside:
    rows.append(('the law alone', f'{percent(saved)} of the {len(chains)} sizes apart'))
  else:
    rows.append(('saved', f'{with_interval(saved)} of the {len(chains)} sizes apart'))
    known = 'not known' if alone.outside else with_interval(alone.saved)
    rows.append(('', f'{known} of the largest, if no other is wanted'))
  rows += [
    ('at equal cost', f'each size from scratch on {percent(spent / whole)} of its tokens'),
    *_published(largest),
  ]
  return f'{verdict(saved, largest.outside, "the sizes apart")}\n{_table(rows)}'


def _sizes(one: Payoff, until: str = '') -> list[tuple[str, str]]:
  """Return a row on the factors and shares of a chain, and one on its tokens a parameter."""
  growths = zip(one.factors, one.shares, strict=True)
  sizes = ', '.join(f'× {factor:.2f} after {percent(share)}' for factor, share in growths)
  before = one.legs[0].tokens / one.legs[0].parameters
  return [
    ('FLOPs a token', f'{sizes} of {one.tokens:.3g} tokens{until}'),
    ('tokens a parameter', f'{before:.3g} of the first size before, {one.length:.3g} of the last'),
  ]


def _table(rows: Sequence[tuple[str, str]]) -> str:
  return aligned([(f'  {name}', text) for name, text in rows], left=(0, 1))


def _published(one: Payoff) -> list[tuple[str, str]]:
  """Return what the published laws say of a growth; their constants hold for their text alone."""
  inside = math.prod(one.factors) <= 2 and one.length <= _USUAL
  rule = 'surest up to × 2 and 20 tokens a parameter'
  return [
    ('2609.19107', '8 to 14 % for × 1.5, 7 to 8 tokens a parameter, 1e18 to 1e20 FLOPs'),
    ('2605.13405', rule + (', as here' if inside else '; this is beyond')),
    ('2510.06548', _OVERTRAINED),
    ('by', _BY),
  ]


def unmeasured(steps: Steps) -> list[str]:
  """Return reasons why the steps of a growth are outside of what was measured."""
  reasons = [_UNMEASURED[type(step)] for step in steps if type(step) in _UNMEASURED]
  for step in steps:
    if isinstance(step, tokens.AddTokens) and step.method != 'group':
      reasons.append(f'{step.method}, which closes less of the gap than a group')
    if isinstance(step, layers.AddLayers) and step.place in ('between', 'behind'):
      reasons.append(f'place={step.place}, whose drawn layers close the gap half as fast')
  return reasons


def next_end(steps: int, made: int) -> int:
  """Return the step to which a run trains on by default, by its config's steps and those made."""
  return max(steps, made) + steps


def of_growth(meta: Meta, after: ModelConfig, steps: Steps, grow: GrowConfig) -> str:
  """Return whether the growth of a checkpoint pays, if it trains on to `next_end`."""
  config, before = meta.config, meta.config.model
  length = flops.length(config)
  costs = [flops.train_flops(model, length) for model in (before, after)]
  factor, seen = costs[1] / costs[0], batches.tokens_at_checkpoint(meta)
  if before.kind != 'lm':
    return f'will it pay? Not known: {IMAGES}'
  if meta.family or not seen:
    what = 'came from transformers' if meta.family else 'has not been trained'
    return (
      f'will it pay? Not known: the source {what}, and what it has seen is not known. It '
      f'exists, so its cost does not count; by 2510.06548, {_OVERTRAINED}. For as many FLOPs it '
      f'trains on alone with {factor:.2f} times as many tokens as the grown model'
    )
  made = 0 if grow.step == 'restart' else meta.step
  history = batches.of_run(meta if made else None, config.data)
  end = next_end(config.train.steps, made)
  ends = [batches.tokens(history, step) for step in (made, end)]
  sizes = zip(costs, (seen, ends[1] - ends[0]), (before, after), strict=True)
  legs = [Leg(cost, trained, flops.matrix_parameters(model)) for cost, trained, model in sizes]
  return render(expect(legs, unmeasured(steps)), f', if it trains on to step {end:,}')
