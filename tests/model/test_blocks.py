"""The tables by which a block finds its parts."""

from tokenformer_jax import config
from tokenformer_jax.model import blocks


def test_every_mixer_of_the_config_has_a_class_and_no_other_has():
  assert set(blocks.MIXERS) == set(config.MIXERS)
