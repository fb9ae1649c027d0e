"""Models of transformers that grow exactly, and stay of their family."""

import dataclasses

import growing
import hub_folders
import pytest

from tokenformer_jax.config import GrowConfig, growth
from tokenformer_jax.convert import families
from tokenformer_jax.grow.steps import widen

pytestmark = pytest.mark.slow
DEEPER = {'gemma2': '(local layer)*2', 'gemma3_text': '(local*2 layer)*2'}


@pytest.mark.parametrize(
  ('kind', 'how'),
  [
    ('gemma2', 'deeper'),
    ('gemma2', 'wider'),
    ('gemma3_text', 'deeper'),
    ('gemma3_text', 'more inner units'),
  ],
)
def test_a_gemma_grows_and_stays_one(kind, how):
  source = hub_folders.model(kind)
  target, config, within = {
    'deeper': (
      dataclasses.replace(source, pattern=DEEPER[kind]), GrowConfig(place='copies'), 0
    ),
    'more inner units': (widen.resized(source, ffn_width=40), growth('net2net'), 1e-6),
    'wider': (widen.resized(source, 32), growth('hypercloning'), 1e-5),
  }[how]  # fmt: skip
  assert not growing.inexact(source, target, config)
  params = hub_folders.params(kind)
  grown = growing.grow_params(params, source, target, config)
  wanted = growing.logits(source, params)
  assert growing.difference(growing.logits(target, grown), wanted) <= within
  family, _ = families.match(target)
  assert family.kind == kind
