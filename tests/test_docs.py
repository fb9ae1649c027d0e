"""The files, tests and keys that README.md, docs/ and docstrings name exist."""

import ast
import collections
import csv
import dataclasses
import functools
import itertools
import re
import typing

import pytest
import tiny_run

import tokenformer_jax
from tokenformer_jax import config

PAGES = ('README.md', *sorted(f'docs/{path.name}' for path in tiny_run.ROOT.glob('docs/*.md')))
PACKAGE = tiny_run.ROOT / 'tokenformer_jax'
# `tests/FILE`, `tests/FILE::TEST`, or `::TEST` of the file before it.
TEST = re.compile(r'`(tests/[\w./]*)?(?:::(\w+))?`')
FILE = re.compile(r'`(\w+/(?:\w+/)*\w+\.py)`')


def find_missing_tests(text):
  """Yield the tests that a page names and that do not exist."""
  path = ''
  for named, test in TEST.findall(text):
    path = named or path
    file = tiny_run.ROOT / path
    found = file.exists() and not test
    if file.is_file() and test:
      found = re.search(rf'^def {test}\(', file.read_text(), re.MULTILINE)
    if (named or test) and not found:
      yield f'{path}::{test}'


@pytest.mark.parametrize('page', PAGES)
def test_tests_and_files_that_a_page_names_exist(page):
  text = (tiny_run.ROOT / page).read_text()
  assert not list(find_missing_tests(text))
  roots = tiny_run.ROOT, PACKAGE
  missing = [f for f in FILE.findall(text) if not any((root / f).is_file() for root in roots)]
  assert not missing
  assert not [*find_stale_keys(text)]


def test_a_missing_test_is_found():
  text = 'see `tests/test_docs.py::test_no_such_name`, `tests/no_file.py` and `::test_other`'
  assert list(find_missing_tests(text)) == [
    'tests/test_docs.py::test_no_such_name',
    'tests/no_file.py::',
    'tests/no_file.py::test_other',
  ]


GONE_KEYS = {'sparse_tokens', 'background', 'drop_groups'}  # that `runs/saved_config.py` reads
FILES = ('py', 'js', 'md', 'ipynb', 'json', 'jsonl', 'png', 'svg', 'safetensors')


@functools.cache
def read_package():
  """Return the syntax tree of each file of the package."""
  return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob('*.py'))}


def defined_names(body):
  """Yield the names that the statements of a module or class define."""
  for node in body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      yield from (one.id for target in targets for one in ast.walk(target) if hasattr(one, 'id'))
    elif isinstance(node, ast.Import | ast.ImportFrom):
      yield from ((one.asname or one.name).partition('.')[0] for one in node.names)
    elif isinstance(node, ast.If | ast.With | ast.Try):
      yield from defined_names(node.body)


@functools.cache
def read_names():
  """Return the names in each module and class, and the attributes that the code takes of each."""
  names, attributes = collections.defaultdict(set), collections.defaultdict(set)
  for path, tree in read_package().items():
    module = path.parent.name if path.stem == '__init__' else path.stem
    names[module].update(defined_names(tree.body))
    if path.stem == '__init__':
      names[module].update(file.stem for file in path.parent.iterdir())
    for node in ast.walk(tree):
      if isinstance(node, ast.ClassDef):
        names[node.name].update(defined_names(node.body))
      if isinstance(node, ast.Attribute) and hasattr(node.value, 'id'):
        attributes[node.value.id].add(node.attr)
      if isinstance(node, ast.Attribute) and hasattr(node.value, 'attr'):
        attributes[node.value.attr].add(node.attr)
  return names, attributes


def read_prose(path, tree):
  """Yield the docstrings and the comments of a file."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
      yield ast.get_docstring(node) or ''
  yield from re.findall(r'(?:^ *|  )# .*', path.read_text(), re.MULTILINE)


def find_stale_names(path, texts):
  """Yield the files, and the names as `module.name`, that texts of a file name and that are gone.

  A name in upper case stands for others.
  """
  names, attributes = read_names()
  for text in texts:
    for file in re.findall(r'(?<![\w/.*~-])((?:\w+/)*\w+\.(?:py|md|ipynb))\b', text):
      folders = tiny_run.ROOT, tiny_run.ROOT / 'configs', PACKAGE, path.parent
      is_pattern = file.removesuffix('.py').isupper()
      if not is_pattern and not any((one / file).is_file() for one in folders):
        yield file
    for dotted in re.findall(r'`(?:tokenformer_jax\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)', text):
      parts = dotted.split('.')
      for owner, name in itertools.pairwise(parts):
        of_instance = attributes['self'] if owner[0].isupper() else set()
        known = names[owner] | attributes[owner] | of_instance
        if names[owner] and name not in known and not (name.isupper() or name in FILES):
          yield dotted


def test_files_and_names_in_docstrings_exist():
  found = [
    f'{path.relative_to(PACKAGE)}: {name}'
    for path, tree in read_package().items()
    for name in find_stale_names(path, read_prose(path, tree))
  ]
  assert not found


def test_a_stale_name_is_found():
  text = 'See `runs/births.py`, steps/entries.py, `entries.hidden`, `Entries.mask` and `FILE.py`.'
  path = PACKAGE / 'steps/optim.py'
  assert [*find_stale_names(path, [text])] == ['runs/births.py', 'entries.hidden']


@functools.cache
def read_keys():
  """Return the names of keys and properties by section of a config, of any kind."""

  def known(section):
    kinds = set().union(*map(known, section.__subclasses__()))
    return kinds | {*dir(section), *getattr(section, '__dataclass_fields__', ())}

  hints = typing.get_type_hints(config.Config)
  sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
  return {name: known(hint) for name, hint in sections.items()}


def find_stale_keys(text):
  """Yield the keys of a config in a text that it does not have."""
  names, attributes = read_names()
  sections = '|'.join(read_keys())
  pattern = rf'(?<![\w./])(?:config\.)?({sections})\.(?!(?:{"|".join(FILES)})\b)([a-z]\w*)\b(?!\()'
  for section, key in re.findall(pattern, text):
    if key not in read_keys()[section] | names[section] | attributes[section] | GONE_KEYS:
      yield f'{section}.{key}'


def test_keys_that_messages_and_helps_name_exist():
  found = [
    f'{path.relative_to(PACKAGE)}: {key}'
    for path, tree in read_package().items()
    if path.parent.name != 'convert'  # Tensors of the hub have such names.
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    for key in find_stale_keys(node.value)
  ]
  assert not found


def test_a_stale_key_is_found():
  text = 'see optim.decay_share, model.json and --config.optim.schedule.decay_share'
  assert [*find_stale_keys(text)] == ['optim.decay_share']


def find_anchors(page):
  """Return the anchors of a page's headings, as GitHub writes them."""
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files_and_headings(page):
  here = tiny_run.ROOT / page
  for link in re.findall(r'\]\((?!https?:)([^)\s]+)\)', here.read_text()):
    path, _, anchor = link.partition('#')
    target = here.parent / path if path else here
    assert target.exists(), link
    assert not anchor or anchor in find_anchors(target), link


def test_the_page_of_the_interface_has_every_public_name():
  page = (tiny_run.ROOT / 'docs/api.md').read_text()
  named = set(re.findall(r'^\.\. auto\w+:: tokenformer_jax\.(\w+)', page, re.MULTILINE))
  assert named == {*tokenformer_jax.__all__}


def read_rows(section):
  """Return the rows of the first table in a section of docs/architecture.md, cell by cell."""
  text = (tiny_run.ROOT / 'docs/architecture.md').read_text().split(f'\n## {section}\n')[1]
  rows = re.search(r'(?:^\|.*\n)+', text, re.MULTILINE)[0].splitlines()[2:]
  return [[cell.strip() for cell in row.strip('|').split('|')] for row in rows]


def test_the_table_has_every_folder_of_the_package_and_its_files_exist():
  rows = [(re.findall(r'`(\w+)/`', row[0]), row[2]) for row in read_rows('The folders')]
  assert {name for names, _ in rows for name in names} == {
    path.parent.name for path in PACKAGE.glob('*/__init__.py')
  }
  for names, files in rows:
    for file in re.findall(r'`([\w/]+\.py)`', files):
      assert any((PACKAGE / name / file).is_file() for name in names), f'{names}: {file}'


def test_the_picture_of_a_step_has_the_files_of_its_table():
  picture = (tiny_run.ROOT / 'docs/step.svg').read_text()
  files = [row[1].strip('`') for row in read_rows('One training step')]
  assert sorted(re.findall(r'>(\w+/\w+\.py)<', picture)) == sorted(files)


@pytest.mark.parametrize('picture', ['prepare', 'step', 'grow'])
def test_the_files_of_a_picture_exist(picture):
  text = (tiny_run.ROOT / f'docs/{picture}.svg').read_text()
  files = re.findall(r'>((?:\w+/)+\w+\.py)<', text)
  assert len(files) >= 10
  assert not [name for name in files if not (PACKAGE / name).is_file()]


def test_the_planned_steps_of_the_page_are_those_of_their_csv():
  page = (tiny_run.ROOT / 'docs/planned_speed.md').read_text()
  table = [line.strip('|').split(' | ') for line in page.splitlines() if line.startswith('| lm_')]
  with (tiny_run.ROOT / 'benchmarks/planned/pods.csv').open() as file:
    rows = [(*row[5:9],) for row in csv.reader(file)][1:]
  assert [tuple(cell.strip() for cell in row[4:]) for row in table] == rows


def test_one_training_step_is_ten_files():
  files = [row[1].strip('`') for row in read_rows('One training step')]
  assert len(files) <= 10
  assert all((PACKAGE / name).is_file() for name in files)
