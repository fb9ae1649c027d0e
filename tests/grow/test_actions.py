"""The table of the actions of growth, and the methods and flags that offer them."""

import inspect

import pytest

from tokenformer_jax.api.run import Run
from tokenformer_jax.config import GrowConfig
from tokenformer_jax.grow.actions import ACTIONS, ASK_FOR, MEANINGS

METHODS = {'groups': 'group_table'}  # other names than those of the actions


def _parameters(name):
  """The parameters of the method of an action, without the run and the target."""
  found = dict(inspect.signature(getattr(Run, METHODS.get(name, name))).parameters)
  assert found.pop('self')
  assert ('target' in found) == ACTIONS[name].makes_run
  found.pop('target', None)
  return found


@pytest.mark.parametrize('name', ACTIONS)
def test_a_method_has_the_arguments_of_its_action(name):
  action, found = ACTIONS[name], _parameters(name)
  keys = {key: found.pop(key) for key in action.keys if key in found}
  assert {key: one.default for key, one in keys.items()} == {
    key: getattr(GrowConfig(), key) for key in keys
  }
  if name == 'grow':
    assert not keys and found.pop('how').kind is inspect.Parameter.VAR_KEYWORD
  else:
    assert set(keys) == set(action.keys)
  assert list(found) == list(action.arguments)
  for argument, parameter in found.items():
    expected = action.arguments[argument]
    assert parameter.default == expected.default, f'another default of {argument}'
    if argument != 'added':  # The method also takes a `Run`.
      assert parameter.annotation == expected.annotation, f'another type of {argument}'


def test_each_argument_and_key_has_one_meaning():
  used = [name for action in ACTIONS.values() for name in (*action.arguments, *action.keys)]
  assert set(MEANINGS) == set(used)


def test_conditions_are_on_arguments_of_the_action():
  for action in ACTIONS.values():
    assert set(action.when) <= {*action.arguments, *action.keys}
    assert set(action.when.values()) <= set(action.arguments)
  for condition in ASK_FOR.values():
    assert set(condition.split(' or ')) <= set(ACTIONS['grow'].arguments)
