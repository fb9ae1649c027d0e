"""Compile and render templates of conversations as `transformers` does, in Jinja's sandbox."""

import datetime
import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jinja2

# The marks of a template in its text; Unicode keeps both out of any text.
MARKS = ('\ufdd0', '\ufdd1')
# Without a value they are no text, as in transformers: many tokenizers have no such token.
TOKENS = {f'{name}_token' for name in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')}


class RenderError(Exception):
  """A template that cannot be compiled, or that cannot write some values; with the reason."""


def has_marks(source: str) -> bool:
  """Return whether a template marks what is learned. Raise a `RenderError` if it is not valid."""
  return _compile(source, False)[1]


def variables(source: str) -> frozenset[str]:
  """Return the names of the values that a template reads. Raise a `RenderError` as `has_marks`."""
  return _compile(source, False)[2]


def render(source: str, values: dict[str, Any], *, learn: bool) -> str:
  """Return what a template makes of values, with marks.

  With `learn`, names without a value are refused, which else are empty, as in transformers.
  """
  template = _compile(source, learn)[0]
  try:
    return template.render(values)
  except RenderError:
    raise
  except Exception as error:  # A template can raise anything.
    reason = f'it fails on these values with {type(error).__name__}: {error}'
    if type(error).__name__ == 'UndefinedError':
      reason = (
        f'it writes a value that is not there ({error}); add it to the row, or name another '
        'template in config.data.chat_template'
      )
    raise RenderError(reason) from error


@functools.lru_cache(maxsize=16)
def _compile(source: str, learn: bool) -> tuple['jinja2.Template', bool, frozenset[str]]:
  """Compile a template, and return whether it has marks, and the names that it reads."""
  import jinja2  # noqa: PLC0415 (from an extra, and only for chat)
  from jinja2 import ext, meta, nodes, sandbox  # noqa: PLC0415

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
      return '' if self._undefined_name in TOKENS else self._fail_with_undefined_error()

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=Needed if learn else jinja2.Undefined,
    extensions=[Marks, ext.loopcontrols],
  )
  environment.globals |= {
    'raise_exception': _refuse,
    'strftime_now': lambda form: datetime.datetime.now().strftime(form),
  }
  # Jinja's own writes < and & as HTML does.
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  try:
    tree = environment.parse(source)
    used = tree.find_all(nodes.ExtensionAttribute)
    marked = any(node.identifier == Marks.identifier for node in used)
    names = frozenset(meta.find_undeclared_variables(tree))
    return environment.from_string(source), marked, names
  except jinja2.TemplateSyntaxError as error:
    raise RenderError(f'line {error.lineno}: {error.message}') from error
  except RecursionError as error:
    raise RenderError(f'it is nested too deeply: {error}') from error


def _refuse(message: str) -> None:
  raise RenderError(message)
