"""Check the arguments of calls from Python by the annotations of the function.

  @arguments.checked
  def generate(prompt: str, *, length: Count = 256): ...

  generate('a', length=2.5)    UserError: generate: length is 2.5; it must be an integer

pydantic validates each argument. Numbers of numpy and JAX become Python's. `Any` is not checked.
"""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from tokenformer_jax.config.section import Float, Int, Str, requirement
from tokenformer_jax.errors import UserError, arg

_Checked = TypeVar('_Checked', bound=Callable[..., Any] | type)
_LONGEST = 60  # letters of a value in a message


def _filled(value: Any) -> Any:
  """Check that a text, path or list is not empty."""
  text = value if isinstance(value, Sequence) else os.fspath(value)
  if not text:
    raise PydanticCustomError('filled', 'not be empty')
  if '\0' in text:
    raise PydanticCustomError('filled', 'not have a null character')
  return value


def _path(value: Any) -> str | os.PathLike[str]:
  if isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
    return _filled(value)
  raise PydanticCustomError('path_type', 'be a path')


FILLED = AfterValidator(_filled)
Path = Annotated[str | os.PathLike[str], PlainValidator(_path)]
Count = Annotated[Int, Field(ge=1)]
Natural = Annotated[Int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Text = Annotated[Str, FILLED]
REPEATED = 'repeated'  # marks a list that has a flag for each item, as texts with commas need


def checked(function: _Checked) -> _Checked:
  """Return a function that checks and converts its arguments before it runs; a decorator.

  In a class, the public methods that it defines are wrapped. `inspect.unwrap` returns the function
  itself.

  Raises:
    UserError: when the function is called, a value does not fit the annotation of its argument.
    TypeError: an argument is unknown, missing, or given twice.
  """
  checking: Any = function
  if isinstance(function, type):
    for name, member in list(vars(function).items()):
      if inspect.isfunction(member) and not name.startswith('_'):
        setattr(function, name, checked(member))
    return checking
  signature = inspect.signature(function)
  types_of = functools.cache(lambda: annotations(function))

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError:
      return function(*args, **kwargs)  # raises the error, with the function's name
    try:
      for name, annotation in types_of().items():
        if name in bound.arguments:
          bound.arguments[name] = convert(annotation, bound.arguments[name], name)
    except UserError as error:
      raise UserError(f'{function.__name__}: {error}') from None
    return function(*bound.args, **bound.kwargs)

  checking = call
  return checking


def needs_value(other: str, value: object, **given: object) -> None:
  """Refuse arguments that have an effect only with another one, whose value is `value`."""
  for name, one in given.items():
    if not value and one not in (None, False, '', (), []):
      raise UserError(f'{arg[name]} has an effect only with {arg[other]}; leave it out')


def annotations(function: Callable[..., Any], without: Collection[str] = ()) -> dict[str, Any]:
  """Return the annotations of the arguments that are checked, by name, but for some of them."""
  parameters = inspect.signature(function).parameters.values()
  hints = {
    one.name: one.annotation
    for one in parameters
    if one.kind is not one.VAR_KEYWORD
    and one.annotation is not one.empty
    and one.name not in without
  }
  holder = types.SimpleNamespace(__annotations__=hints)
  names = inspect.unwrap(function).__globals__
  return typing.get_type_hints(holder, names, include_extras=True)


def convert(annotation: Any, value: Any, name: str) -> Any:
  """Return a value in the type of an annotation; `name` is that of its argument in the message.

  Raises:
    UserError: the value does not fit.
  """
  if annotation is Any:
    return value
  several = value.tolist() if getattr(value, 'ndim', 0) == 1 else value  # of numpy or JAX
  try:
    return _adapter(annotation).validate_python(several)
  except ValidationError as error:
    raise UserError(_sentence(error, value, name)) from None


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
  return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True, strict=True))


def members(annotation: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
  """Yield the classes of a union, each with its arguments: `(int, ())`, `(Sequence, (str,))`."""
  origin = typing.get_origin(annotation)
  if origin is Annotated:
    yield from members(typing.get_args(annotation)[0])
  elif origin in (typing.Union, types.UnionType):
    for member in typing.get_args(annotation):
      yield from members(member)
  else:
    yield origin or annotation, typing.get_args(annotation)


def _sentence(error: ValidationError, value: Any, name: str) -> str:
  """Return one sentence for a value that does not fit; members of unions are alternatives."""
  errors = error.errors(include_url=False)
  if keys := [one['input'] for one in errors if one['loc'][-1:] == ('[key]',)]:
    return f'{name} names {shown(keys[0])}; a name must be a text'
  by_path: dict[tuple[int | str, ...], list[Any]] = {}
  for one in errors:
    by_path.setdefault(tuple(_path_in(value, one['loc'])), []).append(one)
  path, verb = max(by_path, key=len), ' is '
  for step in path:
    value = value[step]
    if isinstance(step, str):
      name, verb = f'{name} has {step}', '='
    elif name.startswith('--'):  # A flag has its list as A,B.
      verb = ' has '
    else:
      name = f'{name}[{step}]'
  return f'{name}{verb}{shown(value)}; it must {requirement(by_path[path])}'


def _path_in(value: Any, location: Sequence[int | str]) -> Iterator[int | str]:
  """Yield the indices and names in a location of pydantic, which also has names of types."""
  for step in location:
    if step in value if isinstance(value, Mapping) else isinstance(step, int):
      yield step
      value = value[step]


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
