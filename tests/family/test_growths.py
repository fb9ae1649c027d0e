"""A law of the loss says when the trunk of a family should grow."""

import re

import numpy as np
import pytest
import tiny_run

from tokenformer_jax.family import growths, ways
from tokenformer_jax.family.jobs import Family

VALUES = {'E': 1.5, 'A': 20.0, 'B': 300.0, 'alpha': 0.3, 'beta': 0.5}
TOKENS, GAMMA = 1e6, 2.0
COUNTS, COSTS = (1e4, 4e4), (6e4, 2e5)


def _loss(count, tokens):
  return 1.5 + 20 / count**0.3 + 300 / tokens**0.5


def _outcome(*shares):
  sizes = growths.Sizes(COUNTS, COSTS, TOKENS)
  return sizes.outcome(VALUES, GAMMA, np.array([shares]))


def test_two_sizes_save_what_the_law_says_by_hand():
  share = 0.5
  small, large = (_loss(count, TOKENS) for count in COUNTS)
  grown = large + (small - large) * share**GAMMA
  needed = (300 / (grown - 1.5 - 20 / COUNTS[1] ** 0.3)) ** 2
  own = (1 - share) * TOKENS * COSTS[1]
  found = _outcome(share)
  saved = 1 - (TOKENS * COSTS[0] + own) / (TOKENS * COSTS[0] + needed * COSTS[1])
  assert found.saved == pytest.approx(saved)
  equal = share * TOKENS + own / COSTS[0]
  assert found.ahead == pytest.approx(_loss(COUNTS[0], equal) - grown)


def test_growth_at_once_saves_nothing():
  found = _outcome(1e-9, 0.2)
  assert found.saved[0] == pytest.approx(0, abs=1e-6) and found.saved[1] > 0.05


def test_a_law_without_gains_from_size_has_no_advice(config):
  jobs = ways.list_jobs(config, Family((1.0, 2.0), 51_200, 'bottom_up'), 'out')
  text = growths.describe(jobs, [1e4, 2e4], VALUES | {'A': 1e-3}, GAMMA)
  assert 'no times of growth cost less' in text and '--grow_at' not in text


@pytest.fixture
def config(tmp_path):
  return tiny_run.config('files:corpus', tmp_path / 'cache')


@pytest.mark.parametrize('sizes', [(1.0, 2.0), (1.0, 2.0, 4.0, 8.0)])
def test_the_advice_is_a_family_that_can_be_made_and_saves_what_it_says(config, sizes):
  def described(**changes):
    jobs = ways.list_jobs(config, Family(sizes, 51_200, 'bottom_up', **changes), 'out')
    counts = [job.size.active for job in ways.list_apart(config, Family(sizes, 51_200, ''))]
    return growths.describe(jobs, counts, VALUES | {'A': 100.0, 'B': 100.0, 'alpha': 0.4}, GAMMA)

  shares, saved = re.search(r'--grow_at=(\S+) costs (\d+)% less', described()).groups()
  taken = described(grow_at=tuple(map(float, shares.split(','))))
  assert taken.startswith(f'by the law the family costs {saved}% less than its sizes'), taken
  assert f'--grow_at={shares} costs {saved}% less' in taken and 'is behind' not in taken
