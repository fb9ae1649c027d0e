"""The tables by which a block finds its parts."""

import inspect
import pkgutil

import pytest

from tokenformer_jax import config
from tokenformer_jax.model import blocks


def test_every_mixer_of_the_config_has_a_class_and_no_other_has():
  assert set(blocks.MIXERS) == set(config.MIXERS)


@pytest.mark.parametrize('kind', blocks.MIXERS)
def test_the_name_of_a_mixer_is_that_of_a_class(kind):
  assert inspect.isclass(pkgutil.resolve_name(blocks.MIXERS[kind]))
