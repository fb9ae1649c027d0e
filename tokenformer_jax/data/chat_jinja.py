"""Compile and render Jinja templates of conversations: those of others in a process with limits.

A template may come with a folder from anywhere. Jinja's sandbox keeps it from files and from
Python, and not from taking memory and time without end, so this file is also a program: it answers
requests, a line of JSON each, with at most `_MEMORY` bytes, and `_SECONDS` of computing for each.
It imports nothing of this package, so it starts quickly, and is as quick as a call of Jinja when it
runs.
"""

import atexit
import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jinja2

# The marks of a template in its text; Unicode keeps both out of any text.
MARKS = ('\ufdd0', '\ufdd1')

_MEMORY = 2**30
_SECONDS = 3
_LONGEST = 2**26  # characters of a text
LIMITS = (
  f'it needs more than {_SECONDS} s, {_MEMORY >> 30} GiB or {_LONGEST >> 20} Mi characters of text'
)
# Without a value they are no text, as in transformers: many tokenizers have no such token.
_TOKENS = {f'{name}_token' for name in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')}
_lock = threading.Lock()


def render(request: dict[str, Any], *, limits: bool) -> dict[str, Any]:
  """Return what a template makes of messages.

  Args:
    request: `source`, the template; `learn`, whether to refuse names without a value, which else
      are empty; `values`, of the names in the template, or None, to compile it only.
    limits: whether to do it in a process with limits.

  Returns:
    `text`, and `marked`: whether the template has marks. Or `error`, what is wrong with the values,
    or `invalid`, what is wrong with the template.
  """
  return _ask(request) if limits else _render(request)


def _render(request: dict[str, Any]) -> dict[str, Any]:
  import jinja2  # noqa: PLC0415 (from an extra, and only for chat)

  values = request['values']
  try:
    compiled, marked = _compile(request['source'], request['learn'])
    text = '' if values is None else compiled.render(values)
  except jinja2.TemplateSyntaxError as error:
    return {'invalid': f'line {error.lineno}: {error.message}'}
  except MemoryError:
    return {'error': LIMITS}
  except _RefusalError as error:
    return {'error': str(error)}
  except Exception as error:  # A template can raise anything.
    return {'error' if values else 'invalid': f'{type(error).__name__}: {error}'}
  return {'text': text, 'marked': marked} if len(text) <= _LONGEST else {'error': LIMITS}


@functools.lru_cache(maxsize=16)
def _compile(source: str, learn: bool) -> tuple['jinja2.Template', bool]:
  """Compile a template as transformers does, and return whether it has marks."""
  import jinja2  # noqa: PLC0415
  from jinja2 import ext, nodes, sandbox  # noqa: PLC0415

  class Marks(ext.Extension):
    """The block {% generation %}, whose text comes out between two marks."""

    tags = {'generation'}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
      return nodes.CallBlock(self.call_method('mark'), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
      return caller().join(MARKS)

  class Needed(jinja2.Undefined):
    """A name without a value, which may be asked for, but has no text."""

    def __str__(self) -> str:
      return '' if self._undefined_name in _TOKENS else self._fail_with_undefined_error()

  @jinja2.pass_context
  def unchanged(context: Any, value: Any) -> Any:  # With it nothing is computed to compile.
    del context
    return value

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    optimized=False,
    finalize=unchanged,
    undefined=Needed if learn else jinja2.Undefined,
    extensions=[Marks, ext.loopcontrols],
  )
  environment.globals |= {'raise_exception': _raise, 'strftime_now': _strftime_now}
  environment.filters['tojson'] = _to_json
  used = environment.parse(source).find_all(nodes.ExtensionAttribute)
  marked = any(node.identifier == Marks.identifier for node in used)
  return environment.from_string(source), marked


class _RefusalError(Exception):
  """A template refuses messages by `raise_exception`."""


def _raise(message: str) -> None:
  raise _RefusalError(message)


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


def _ask(request: dict[str, Any]) -> dict[str, Any]:
  """Have the process with limits render; it starts again after it reached one."""
  line = json.dumps(request, default=str).encode() + b'\n'
  with _lock:
    process = _start(os.getpid())
    assert process.stdin and process.stdout
    try:
      process.stdin.write(line)
      process.stdin.flush()
      reply = process.stdout.readline()
    except BrokenPipeError:
      reply = b''
    except BaseException:
      _end(process)  # Its answer would be taken for that of the next request.
      raise
    if not reply:
      _end(process)
  return json.loads(reply) if reply else {'error': LIMITS}


@functools.cache
def _start(pid: int) -> subprocess.Popen:
  """Start the program for this process; a fork of it has another `pid`, and starts its own."""
  del pid
  process = subprocess.Popen(
    [sys.executable, '-P', __file__],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},  # of jinja2
  )
  atexit.register(_end, process)
  return process


def _end(process: subprocess.Popen) -> None:
  _start.cache_clear()
  atexit.unregister(_end)
  process.kill()
  process.communicate()


def _main() -> None:
  """Answer requests until there are no more."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process.
  with contextlib.suppress(ValueError, OSError):  # The system has a lower limit, or knows none.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  for line in sys.stdin.buffer:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # Its signal ends the process.
    reply = json.dumps(_render(json.loads(line))).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(reply + b'\n')
    sys.stdout.buffer.flush()


if __name__ == '__main__':
  _main()
