"""Parse the table of tensors in a PyTorch file, a pickle.

Python's unpickler is unsafe for untrusted files: it calls any function that a pickle names, trusts
sizes in the pickle (a memo index of 2³¹ allocates 32 GiB), and can hash nested tuples without end.
`parse` instead takes the instructions one by one from `pickletools`, which only splits bytes. It
accepts the few instructions that a table of tensors needs, each of which creates at most one
object. The names that `torch.save` writes map to inert functions of this module.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

STORAGES = {  # by dtype name; the last ones only for messages
  'float32': 'FloatStorage',
  'float16': 'HalfStorage',
  'bfloat16': 'BFloat16Storage',
  'float64': 'DoubleStorage',
  'int64': 'LongStorage',
  'int32': 'IntStorage',
  'uint8': 'ByteStorage',
  'bool': 'BoolStorage',
}


class Storage(NamedTuple):
  """A one-dimensional array of numbers in the file."""

  dtype: str
  key: str  # the key of the file's record


class View(NamedTuple):
  """A tensor in a storage. Only the storage is checked; the other fields are as in the pickle."""

  storage: Storage
  offset: Any
  shape: Any
  strides: Any


class RefusedError(Exception):
  """A pickle names a function or class that no table of tensors needs."""


class _Dtype(NamedTuple):
  name: str


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> View:
  if not isinstance(storage, Storage):
    raise ValueError('a tensor without a storage')
  return View(storage, offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
  return data


def _ordered_dict(*items: Any) -> dict[Any, Any]:
  if items:
    raise ValueError('an OrderedDict with arguments')
  return {}


_KNOWN: dict[str, Any] = {
  'collections.OrderedDict': _ordered_dict,
  'torch._utils._rebuild_tensor_v2': _view,
  'torch._utils._rebuild_parameter': _parameter,
  **{f'torch.{storage}': _Dtype(dtype) for dtype, storage in STORAGES.items()},
}
_CALLABLE = (_view, _parameter, _ordered_dict)

_LITERALS = {'INT', 'BININT', 'BININT1', 'BININT2', 'LONG', 'LONG1', 'LONG4', 'FLOAT', 'BINFLOAT'}
_LITERALS |= {'STRING', 'BINSTRING', 'SHORT_BINSTRING', 'BINBYTES', 'SHORT_BINBYTES'}
_LITERALS |= {'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8'}
_MOST_INSTRUCTIONS = 2**18  # 400 tensors take about 20,000
_CONSTANTS = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}
_EMPTY = {'EMPTY_TUPLE': tuple, 'EMPTY_LIST': list, 'EMPTY_DICT': dict}
_TUPLES = {'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3}


def parse(table: bytes) -> Any:
  """Return the object that a pickle describes, with a `View` for each tensor; run no code of it.

  The memory use depends on the length of the pickle only.

  Raises:
    RefusedError: the pickle names a function or class that no table of tensors needs.
    Exception: of any type, if the pickle is malformed or has other instructions.
  """
  machine = _Machine()
  for i, (instruction, argument, _) in enumerate(pickletools.genops(table)):
    if i == _MOST_INSTRUCTIONS:
      raise ValueError(f'more than {_MOST_INSTRUCTIONS} instructions')
    machine.step(instruction.name, argument)
  return machine.stack.pop()


class _Machine:
  """The state of a parse: a stack, marks on it, and a memo."""

  def __init__(self):
    self.stack: list[Any] = []
    self.marks: list[int] = []
    self.memo: dict[int, Any] = {}

  def step(self, name: str, argument: Any) -> None:
    stack = self.stack
    if name in _LITERALS:
      stack.append(argument)
    elif name in _CONSTANTS:
      stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
      stack.append(_EMPTY[name]())
    elif name in _TUPLES:
      stack.append(tuple(self._taken(len(stack) - _TUPLES[name])))
    elif name == 'MARK':
      self.marks.append(len(stack))
    elif name in ('PUT', 'BINPUT', 'LONG_BINPUT'):
      self.memo[argument] = stack[-1]
    elif name == 'MEMOIZE':
      self.memo[len(self.memo)] = stack[-1]
    elif name in ('GET', 'BINGET', 'LONG_BINGET'):
      stack.append(self.memo[argument])
    elif name in _MADE_OF_MARKED:
      stack.append(_MADE_OF_MARKED[name](self._taken(self.marks.pop())))
    elif name in ('APPEND', 'APPENDS'):
      items = self._taken(self.marks.pop() if name == 'APPENDS' else len(stack) - 1)
      _checked(stack[-1], list).extend(items)
    elif name in ('SETITEM', 'SETITEMS'):
      items = self._taken(self.marks.pop() if name == 'SETITEMS' else len(stack) - 2)
      _checked(stack[-1], dict).update(_pairs(items))
    elif name == 'BUILD':
      stack.pop()  # The attributes of an object: for a table, its metadata.
    elif name in _NAMING:
      self._name(name, argument)
    elif name == 'BINPERSID':
      stack.append(_storage(stack.pop()))
    elif name == 'REDUCE':
      function, arguments = self._taken(len(stack) - 2)
      if not any(function is known for known in _CALLABLE):
        raise ValueError('a call of an object that is not a function')
      stack.append(function(*_checked(arguments, tuple)))
    elif name not in ('PROTO', 'FRAME', 'STOP'):
      raise ValueError(f'the instruction {name}')

  def _name(self, instruction: str, argument: Any) -> None:
    if instruction.startswith('EXT'):
      raise RefusedError(f'extension.{argument}')
    if instruction == 'STACK_GLOBAL':
      argument = ' '.join(self._taken(len(self.stack) - 2))
    name = argument.replace(' ', '.')
    if name not in _KNOWN or instruction == 'INST':
      raise RefusedError(name)
    self.stack.append(_KNOWN[name])

  def _taken(self, start: int) -> list[Any]:
    """Remove the top of the stack from `start` on, and return it."""
    if start < 0:
      raise ValueError('an empty stack')
    items = self.stack[start:]
    del self.stack[start:]
    return items


_NAMING = ('GLOBAL', 'STACK_GLOBAL', 'INST', 'EXT1', 'EXT2', 'EXT4')


def _checked(value: Any, wanted: type) -> Any:
  if type(value) is not wanted:
    raise ValueError(f'a {type(value).__name__} instead of a {wanted.__name__}')
  return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
  keys, values = items[::2], items[1::2]
  if any(type(key) not in (str, int) for key in keys):  # Nested tuples may take for ever to hash.
    raise ValueError('a key that is not a name')
  return dict(zip(keys, values, strict=True))


_MADE_OF_MARKED: dict[str, Callable[[list[Any]], Any]] = {
  'TUPLE': tuple,
  'LIST': list,
  'DICT': _pairs,
}


def _storage(reference: Any) -> Storage:
  word, dtype, key, _, _ = _checked(reference, tuple)
  if _checked(word, str) != 'storage' or not isinstance(dtype, _Dtype):
    raise ValueError('a reference that is not to a storage')
  return Storage(dtype.name, _checked(key, str))
