"""Every call of `python_calls.py` is refused in one sentence, and writes nothing."""

import contextlib
import inspect
import os
import typing
from pathlib import Path

import numpy as np
import pytest
from inputs import files_of
from python_calls import CALLS

import tokenformer_jax
from tokenformer_jax.config import arguments
from tokenformer_jax.errors import UserError

PUBLIC = [
  *(tokenformer_jax.load, tokenformer_jax.train, tokenformer_jax.bring, tokenformer_jax.plan.plan),
  *(
    method
    for name, method in inspect.getmembers(tokenformer_jax.Run, inspect.isfunction)
    if not name.startswith('_')
  ),
]
# Checked by the functions themselves, in rows of `python_calls.py`.
BY_HAND = {('plan', 'config'), ('logits', 'inputs')}
SIGNED = {'factor', 'rotary_fraction'}


@pytest.fixture(scope='module')
def names(material, tmp_path_factory):
  """Return the names that the calls use; afterwards nothing may have been written."""
  runs = {name: tokenformer_jax.load(material / name) for name in ('lm', 'dense', 'learned', 'vit')}
  folder = tmp_path_factory.mktemp('calls')
  before = files_of(material)
  with contextlib.chdir(folder):
    yield {**runs, 'tf': tokenformer_jax, 'to': folder / 'to', 'np': np}
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


@pytest.mark.parametrize('function', PUBLIC, ids=lambda function: function.__name__)
def test_every_argument_has_a_type_and_a_bound(function):
  name = function.__name__
  assert hasattr(function, '__wrapped__'), 'its arguments are not checked'
  checked = arguments.annotations(function)
  declared = inspect.signature(function).parameters.values()
  assert {p.name for p in declared if p.kind is not p.VAR_KEYWORD} - {'self'} == {*checked}
  for argument, annotation in checked.items():
    kinds = {kind for kind, _ in arguments.members(annotation)}
    texts = bool({str, os.PathLike} & kinds)
    wrong = [object(), b'a', 1j, float('nan')]
    wrong += [True] * (bool not in kinds) + [2.5] * (float not in kinds) + ['8'] * (not texts)
    wrong += [-1] * (argument not in SIGNED) + [None] * (type(None) not in kinds)
    is_path = arguments.Path in (annotation, *typing.get_args(annotation))
    wrong += [''] * (is_path and argument != 'tokenizer')
    for value in wrong * ((name, argument) not in BY_HAND):
      with pytest.raises(UserError, match=rf'^{argument}(\[0\])? (is|names) .*; it must '):
        arguments.convert(annotation, value, argument)
        pytest.fail(f'{argument}={value!r} is taken')


def test_what_is_refused_once_is_refused_again(names):
  for _ in range(2):
    with pytest.raises(UserError, match='no layer of this model has full attention'):
      names['learned'].generate('a', clip_positions=8)
