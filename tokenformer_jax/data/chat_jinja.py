"""Compile and render templates of conversations as `transformers` does, in Jinja's sandbox."""

import datetime
import functools
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jinja2

# The marks of a template in its text; Unicode keeps both out of any text.
MARKS = ('\ufdd0', '\ufdd1')
# Without a value they are no text, as in transformers: many tokenizers have no such token.
_TOKENS = {f'{name}_token' for name in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')}


_LONGEST = 2**24  # characters that a multiplication in a template may make


class RenderError(Exception):
  """A template that cannot be compiled, or that cannot write some values; with the reason."""


def has_marks(source: str) -> bool:
  """Return whether a template marks what is learned. Raise a `RenderError` if it is not valid."""
  return _compile(source, False)[1]


def render(source: str, values: dict[str, Any], *, learn: bool) -> str:
  """Return what a template makes of values, with marks.

  With `learn`, names without a value are refused, which else are empty.
  """
  template, _ = _compile(source, learn)
  try:
    return template.render(values)
  except RenderError:
    raise
  except Exception as error:  # A template can raise anything.
    raise RenderError(f'{type(error).__name__}: {error}') from error


@functools.lru_cache(maxsize=16)
def _compile(source: str, learn: bool) -> tuple['jinja2.Template', bool]:
  """Compile a template, and return whether it has marks."""
  import jinja2  # noqa: PLC0415 (from an extra, and only for chat)
  from jinja2 import ext, nodes, sandbox  # noqa: PLC0415

  class Marks(ext.Extension):
    """The block {% generation %}, whose text comes out between two marks."""

    tags = {'generation'}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return nodes.CallBlock(self.call_method('mark'), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
      return caller().join(MARKS)

  class Needed(jinja2.Undefined):
    """A name without a value, which may be asked for, but has no text."""

    def __str__(self) -> str:
      return '' if self._undefined_name in _TOKENS else self._fail_with_undefined_error()

  class Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses products that no text needs."""

    intercepted_binops = frozenset(('*', '**'))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
      sizes = [len(one) if hasattr(one, '__len__') else one for one in (left, right)]
      is_text = sizes != [left, right]
      if math.prod(sizes) > _LONGEST if is_text else operator == '**' and abs(right) > 100:
        raise RenderError(f'it makes a text or number of more than {_LONGEST >> 20} Mi characters')
      return super().call_binop(context, operator, left, right)

  environment = Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=Needed if learn else jinja2.Undefined,
    extensions=[Marks, ext.loopcontrols],
  )
  environment.globals |= {'raise_exception': _refuse, 'strftime_now': _strftime_now}
  environment.filters['tojson'] = _to_json
  try:
    used = environment.parse(source).find_all(nodes.ExtensionAttribute)
    marked = any(node.identifier == Marks.identifier for node in used)
    return environment.from_string(source), marked
  except jinja2.TemplateSyntaxError as error:
    raise RenderError(f'line {error.lineno}: {error.message}') from error
  except RecursionError as error:
    raise RenderError(f'it is nested too deeply: {error}') from error


def _refuse(message: str) -> None:
  raise RenderError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )
