"""The site of these pages: `sphinx-build -W docs build/site` makes it (the extra [docs])."""

import contextlib
import inspect
import io
import re
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import sphinx.application
from absl import flags

import tokenformer_jax
from tokenformer_jax.cli import verbs

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / 'docs'
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
LINK = re.compile(r'\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)')
INDENT = '  '

project = 'tokenformer_jax'
author = PROJECT['authors'][0]['name']
version = release = tokenformer_jax.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx_copybutton']
myst_heading_anchors = 4
default_role = 'literal'  # docstrings quote code by single backticks
autodoc_typehints = 'description'
autodoc_member_order = 'bysource'

html_theme = 'furo'
html_title = f'tokenformer_jax {version}'
html_show_copyright = False
html_static_path = ['_static']
html_css_files = ['site.css']


def mend_link(folder: Path, link: re.Match[str]) -> str:
  """Return a Markdown link that works on the site, which has the pages and pictures of docs/ only.

  A link whose text is the name of a page gets the page's title. Files outside of docs/ are at the
  address that pyproject.toml names as `Repository`; without one the site offers them for download,
  and a folder or another page is only named.

  Args:
    folder: where the page is.
    link: a match of `LINK`.
  """
  text, target = link.groups()
  path, _, anchor = target.partition('#')
  file = (folder / path).resolve()
  if not file.exists():
    return link[0]  # Sphinx warns.
  if file.is_relative_to(DOCS):
    named = text in (path, target)
    anchor = anchor and f'#{anchor}'
    return f'[{"" if named else text}]({file.relative_to(DOCS)}{anchor})'
  if address := PROJECT['urls'].get('Repository'):
    return f'[{text}]({address}/tree/main/{file.relative_to(ROOT)})'
  shown = (
    text if file.is_dir() or file.suffix == '.md' else f'[{text}](../{file.relative_to(ROOT)})'
  )
  return shown


def render_help() -> str:
  """Return a section for each verb, with what its `--help` prints."""
  sections = []
  for verb in verbs.VERBS:
    others = {*flags.FLAGS}
    sys.argv = ['tokenformer', verb, '--help']
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
      verbs.main()
    for name in {*flags.FLAGS} - others:
      delattr(flags.FLAGS, name)
    sections.append(f'\n## {verb}\n\n```text\n{printed.getvalue()}```\n')
  return ''.join(sections)


def read_page(app: sphinx.application.Sphinx, page: str, source: list[str]) -> None:
  """Put README.md on the first page and the help on that of flags; mend links."""
  del app
  if page == 'index':
    readme = (ROOT / 'README.md').read_text()
    source[0] = LINK.sub(lambda link: mend_link(ROOT, link), readme) + source[0]
    return
  source[0] = LINK.sub(lambda link: mend_link(DOCS, link), source[0])
  if page == 'flags':
    source[0] += render_help()


def mark_examples(
  app: sphinx.application.Sphinx,
  what: str,
  name: str,
  member: Any,
  options: Any,
  lines: list[str],
) -> None:
  """Let indented blocks between the paragraphs of a docstring be code."""
  del app, what, name, member, options
  found, in_example, before = [], False, ''
  for line in lines:
    starts = line.startswith(INDENT) and not before.startswith(INDENT) and found[-1:] == ['']
    if starts:
      found += ['.. code-block::', '']
    in_example = starts or (in_example and (not line or line.startswith(INDENT)))
    found.append(INDENT + line if in_example and line else line)
    before = line or before
  lines[:] = found


def simplify_types(app: sphinx.application.Sphinx, member: Any, bound_method: bool) -> None:
  """Show `str` for `Annotated[str, …]`, which is for the checks of arguments.

  Results, and types with names that are imported for checkers alone, are shown as they are written.
  """
  del app, bound_method
  function = inspect.unwrap(member)
  if not inspect.isfunction(function):
    return
  plain = {}
  for name, annotation in function.__annotations__.items():
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
      plain |= typing.get_type_hints(holder, function.__globals__)
    except NameError:
      plain[name] = _as_written(annotation)
  if 'return' in plain:
    result = inspect.signature(member).return_annotation
    plain['return'] = _as_written(result) if isinstance(result, str) else result
  for each in (member, function):
    each.__annotations__ = plain


def _as_written(text: str) -> type:
  """Return a type that Sphinx shows as this text, and does not look for."""
  return type(text, (), {'__module__': 'builtins'})


def setup(app: sphinx.application.Sphinx) -> None:
  """Connect the functions above."""
  app.connect('source-read', read_page)
  app.connect('autodoc-process-docstring', mark_examples, priority=100)  # before napoleon
  app.connect('autodoc-before-process-signature', simplify_types)
