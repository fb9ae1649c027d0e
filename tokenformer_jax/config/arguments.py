"""Check the arguments of calls from Python by the annotations of the function.

  @arguments.checked
  def generate(prompt: str, *, length: Annotated[int, Key(least=1)] = 256): ...

  generate('a', length=2.5)    UserError: generate: length is 2.5; it must be an integer

Annotations are built of int, float, bool, str, None, `Path`, other classes, `Sequence`, `Mapping`
and unions of these. An object with a method `wrong` in an `Annotated`, a `Key` of a config or
`FILLED`, is a further check of the value. `Any` is not checked.
"""

import collections.abc
import functools
import inspect
import itertools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar

from tokenformer_jax.errors import UserError, nearest

_Checked = TypeVar('_Checked', bound=Callable[..., Any] | type)
_LONGEST = 60  # letters of a value in a message

_NAMES = {  # one value, and several
  int: ('an integer', 'integers'),
  float: ('a finite number', 'finite numbers'),
  bool: ('True or False', 'True or False'),
  str: ('a text', 'texts'),
  os.PathLike: ('a path', 'paths'),
  type(None): ('None', 'None'),
}

_DTYPES = {int: 'iu', float: 'iuf', bool: 'b'}  # kinds of numpy's dtypes that become each type


class _Filled:
  """Check that a text, path or list is not empty."""

  def __repr__(self) -> str:
    return 'FILLED'

  def wrong(self, value: str | os.PathLike[str] | list[Any]) -> str:
    """Return the requirement that a value violates: 'it must not be empty'; '' for none."""
    items = value if isinstance(value, list) else os.fspath(value)
    if not items:
      return 'it must not be empty'
    return 'it must not have a null character' if '\0' in items else ''


FILLED = _Filled()
Path = Annotated[str | os.PathLike[str], FILLED]


def checked(function: _Checked) -> _Checked:
  """Return a function that checks and converts its arguments before it runs; a decorator.

  Numbers of numpy and JAX become Python's, a sequence becomes a list. A bool does not count as
  a number, nor a text as a sequence. An error from the function names an argument in the place of
  the flag of the command. In a class, the public methods that it defines are wrapped.

  Raises:
    UserError: when the function is called, a value does not fit the annotation of its argument.
    TypeError: an argument is unknown, missing, or given twice.
  """
  if isinstance(function, type):
    for name, member in list(vars(function).items()):
      if inspect.isfunction(member) and not name.startswith('_'):
        setattr(function, name, checked(member))
    return function
  signature = inspect.signature(function)

  @functools.cache
  def annotations() -> dict[str, Any]:
    hints = {k: v for k, v in function.__annotations__.items() if k != 'return'}
    holder = types.SimpleNamespace(__annotations__=hints)
    return typing.get_type_hints(holder, function.__globals__, include_extras=True)

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      raise TypeError(_signature_error(function.__name__, error, signature, kwargs)) from None
    for name, annotation in annotations().items():
      kind = signature.parameters[name].kind
      if name in bound.arguments and kind is not inspect.Parameter.VAR_KEYWORD:
        try:
          bound.arguments[name] = _converted(annotation, bound.arguments[name], name)
        except _MisfitError as error:
          raise UserError(f'{function.__name__}: {error}') from None
    try:
      return function(*bound.args, **bound.kwargs)
    except UserError as error:
      if (message := _without_flags(str(error), bound)) == str(error):
        raise
      raise UserError(message) from error

  return call


class _MisfitError(Exception):
  """A value that does not fit its annotation; the message is the sentence without the method."""


def _signature_error(
  function: str, error: TypeError, signature: inspect.Signature, kwargs: dict[str, Any]
) -> str:
  """Return the message for arguments that do not fit a signature."""
  others = inspect.Parameter.VAR_KEYWORD
  known = {name: value.kind for name, value in signature.parameters.items() if name != 'self'}
  names = [f'**{name}' if kind is others else name for name, kind in known.items()]
  unknown = [name for name in kwargs if name not in names]
  if unknown:
    return f'{function}: there is no argument {unknown[0]!r}{nearest(unknown[0], names)}'
  taken = f'the arguments are {", ".join(names)}' if names else 'there are no arguments'
  return f'{function}: {error}; {taken}'


def _without_flags(message: str, bound: inspect.BoundArguments) -> str:
  """Return a message with arguments in the place of the command's flags: `groups` for `--groups`.

  A message with a whole command line stays, and so do texts and paths that were given.
  """
  if 'tokenformer ' in message:
    return message
  values = [v if isinstance(v, list) else [v] for v in bound.arguments.values()]
  texts = {os.fspath(v) for v in itertools.chain(*values) if isinstance(v, (str, os.PathLike))}
  given = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if '--' in text]
  flag = rf'(?<![\w/.-])--(?=(?:{"|".join(bound.signature.parameters)})\b)'
  return re.sub(f'({"|".join(given) or "(?!)"})|{flag}', lambda found: found[1] or '', message)


def classes(annotation: Any) -> set[type]:
  """Return the outer types that an annotation allows, such as `int`, `Mapping` and `NoneType`."""
  return {_class(_bare(choice)) for choice in _choices(annotation)}


def convert(annotation: Any, value: Any, name: str) -> Any:
  """Return a value in the type of an annotation; `name` is that of its argument in the message.

  Raises:
    UserError: the value does not fit.
  """
  try:
    return _converted(annotation, value, name)
  except _MisfitError as error:
    raise UserError(str(error)) from None


def _converted(annotation: Any, value: Any, name: str, verb: str = ' is ') -> Any:
  """Return a value in the type of an annotation.

  In the message, `name` is that of the argument or of the place in it, and `verb` the text between
  the name and the value.

  Raises:
    _MisfitError: the value does not fit.
  """
  if annotation is Any:
    return value
  choices = list(_choices(annotation))
  fitting = [choice for choice in choices if _is_a(_bare(choice), value)]
  if not fitting:
    raise _MisfitError(f'{name}{verb}{shown(value)}; it must be {_description(choices, value)}')
  found = _inside(_bare(fitting[0]), value, name)
  for check in getattr(fitting[0], '__metadata__', ()):
    if wrong := check.wrong(found):
      raise _MisfitError(f'{name}{verb}{shown(value)}; {wrong}')
  return found


def _choices(annotation: Any) -> Iterator[Any]:
  """Yield the members of a union, each with the checks of the union."""
  checks = getattr(annotation, '__metadata__', ())
  bare = _bare(annotation)
  if typing.get_origin(bare) in (typing.Union, types.UnionType):
    for member in typing.get_args(bare):
      for choice in _choices(member):
        yield Annotated[choice, *checks] if checks else choice
  else:
    yield annotation


def _bare(annotation: Any) -> Any:
  """Return an annotation without its checks."""
  return annotation.__origin__ if hasattr(annotation, '__metadata__') else annotation


def _class(bare: Any) -> type:
  return typing.get_origin(bare) or bare


def _is_a(bare: Any, value: Any) -> bool:
  """Return whether a value has the outer type of an annotation."""
  expected = _class(bare)
  if expected in _DTYPES:
    if getattr(value, 'ndim', None) == 0:  # of numpy or JAX
      fits = value.dtype.kind in _DTYPES[expected]
    else:
      python = (int, float) if expected is float else expected
      fits = isinstance(value, python) and (expected is bool) == isinstance(value, bool)
    return fits and (expected is not float or _is_finite(value))
  if expected is collections.abc.Sequence:
    several = isinstance(value, collections.abc.Sequence) and not isinstance(value, (str, bytes))
    return several or getattr(value, 'ndim', 0) == 1
  if expected is os.PathLike:
    return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
  return isinstance(value, expected)


def _is_finite(number: Any) -> bool:
  try:
    return math.isfinite(number)
  except OverflowError:  # an integer that is larger than any float
    return False


def _inside(bare: Any, value: Any, name: str) -> Any:
  """Return a value of the right outer type with everything in it converted."""
  expected, inner = _class(bare), typing.get_args(bare)
  if expected in (int, float, bool):
    return operator.index(value) if expected is int else expected(value)
  if expected is collections.abc.Sequence:
    return [_converted(inner[0], item, f'{name}[{i}]') for i, item in enumerate(value)]
  if expected is collections.abc.Mapping:
    for key in value:
      if not isinstance(key, str):
        raise _MisfitError(f'{name} names {shown(key)}; a name must be a text')
    return {
      key: _converted(inner[1], item, f'{name} has {key}', '=') for key, item in value.items()
    }
  return value


def _description(choices: list[Any], value: Any) -> str:
  """Return the allowed types as text, `an integer or None`, with a hint for a single value."""
  bare = [_bare(choice) for choice in choices]
  names = dict.fromkeys(map(_name, bare))
  if 'a path' in names:
    names.pop('a text', None)  # A path may be a text.
  types_allowed = _alternatives(names)
  lists = [member for member in bare if _class(member) is collections.abc.Sequence]
  items = _choices(typing.get_args(lists[0])[0]) if lists else ()
  single = any(_is_a(_bare(item), value) for item in items)
  return f'{types_allowed}, for example [{shown(value)}]' if single else types_allowed


def _alternatives(names: Iterable[str]) -> str:
  *others, last = names
  return f'{", ".join(others)} or {last}' if others else last


def _name(bare: Any) -> str:
  """Return the description of an annotation."""
  expected, inner = _class(bare), typing.get_args(bare)
  if expected is collections.abc.Sequence:
    several = dict.fromkeys(_names(_bare(choice))[1] for choice in _choices(inner[0]))
    if 'paths' in several:
      several.pop('texts', None)
    return f'a list of {_alternatives(several)}'
  if expected is collections.abc.Mapping:
    values = _alternatives(_names(_bare(choice))[1] for choice in _choices(inner[1]))
    return f'a dict of {values} by name'
  return _names(bare)[0]


def _names(bare: Any) -> tuple[str, str]:
  """Return the name of a type and its plural; a base class may have that of its one subclass."""
  expected = _class(bare)
  name = getattr(expected, 'name_for_users', expected.__name__)
  return _NAMES.get(expected) or (f'a {name}', f'{name}s')


def shown(value: Any) -> str:
  """Return a value for a message, in one line: the shape of an array, the beginning of a text."""
  if isinstance(value, type):  # One of numpy's has the attributes of its arrays.
    return f'the class {value.__name__}'
  if getattr(value, 'ndim', 0):
    return f'an array of {value.dtype} {list(value.shape)}'
  if hasattr(value, 'dtype'):
    return str(value)
  text = ' '.join(repr(value).split())
  return text if len(text) <= _LONGEST else f'{text[: _LONGEST - 1]}…'
