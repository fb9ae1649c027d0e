"""The files and tests that README.md and docs/ name exist."""

import re

import pytest
import tiny_run

import tokenformer_jax

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


def test_a_missing_test_is_found():
  text = 'see `tests/test_docs.py::test_no_such_name`, `tests/no_file.py` and `::test_other`'
  assert list(find_missing_tests(text)) == [
    'tests/test_docs.py::test_no_such_name',
    'tests/no_file.py::',
    'tests/no_file.py::test_other',
  ]


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


def test_one_training_step_is_ten_files():
  files = [row[1].strip('`') for row in read_rows('One training step')]
  assert len(files) <= 10
  assert all((PACKAGE / name).is_file() for name in files)
