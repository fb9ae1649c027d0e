"""A suggestion is near, or there is none."""

import pytest

from tokenformer_jax.errors import misspelt, nearest

CHIPS = ('v4', 'v5e', 'v5p', 'v6e', 'tpu7x')
FLAGS = ('config', 'workdir', 'stopped_status')


@pytest.mark.parametrize(
  ('name', 'allowed', 'meant'),
  [
    ('widht', ('width', 'heads'), 'width'),
    ('softmx', ('softmax', 'exp_l2_norm'), 'softmax'),
    ('fnn', ('qkv', 'proj', 'ffn'), 'ffn'),
    ('work-dir', FLAGS, 'workdir'),
    ('Config', FLAGS, 'config'),
    ('optimizer', ('model', 'data', 'optim'), 'optim'),
    ('temp', ('temperature', 'top_k'), 'temperature'),
    ('shrnk', ('grow', 'shrink', 'merge'), 'shrink'),
    ('v6e-256', CHIPS, 'v6e'),
  ],
)
def test_a_misspelt_name_is_recognised(name, allowed, meant):
  assert misspelt(name, allowed) == meant, 'a misspelling is not put right'


@pytest.mark.parametrize(
  ('name', 'allowed'),
  [
    ('steps', FLAGS),
    ('h100', CHIPS),
    ('xyz', ('replica', 'fsdp', 'tokens')),
    ('a', ('b', 'c')),
    ('lr', ('learning_rate', 'layer_decay')),
  ],
)
def test_only_near_names_are_suggested(name, allowed):
  assert misspelt(name, allowed) is None, 'a reader is sent the wrong way'
  assert nearest(name, allowed) == f'; known names: {", ".join(sorted(allowed))}'
