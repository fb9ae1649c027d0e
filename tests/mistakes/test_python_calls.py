"""Every call of `python_calls.py` is refused in one sentence, and writes nothing."""

import contextlib
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from inputs import files_of
from python_calls import CALLS

import tokenformer_jax
from tokenformer_jax.config import arguments
from tokenformer_jax.errors import UserError


@pytest.fixture(scope='module')
def names(material, tmp_path_factory):
  """Return the names that the calls use; afterwards nothing may have been written."""
  runs = {name: tokenformer_jax.load(material / name) for name in ('lm', 'dense', 'learned', 'vit')}
  folder = tmp_path_factory.mktemp('calls')
  before = files_of(material)
  with contextlib.chdir(folder):
    yield {**runs, 'tf': tokenformer_jax, 'to': folder / 'to', 'np': np, 'jnp': jnp, 'Path': Path}
  assert not os.listdir(folder), 'a wrong call wrote into the working directory'
  assert files_of(material) == before, 'a wrong call changed files of the user'


@pytest.mark.parametrize('call', CALLS)
def test_a_wrong_call_is_refused_in_one_sentence(call, names):
  with pytest.raises((UserError, TypeError)) as error:
    eval(call, names)
  said = str(error.value)
  assert CALLS[call] in said, f'the sentence does not name {CALLS[call]!r}: {said}'
  assert f'--{CALLS[call]}' not in said, f'names a flag and not the argument: {said}'
  assert '\n' not in said and len(said) < 400, f'not one sentence: {said}'
  assert error.type is UserError or error.traceback[-1].path == Path(arguments.__file__), (
    f'an error from inside instead of a check: {said}'
  )
