"""The site of docs/: no warnings, every link inside leads somewhere, nothing is from elsewhere."""

import html.parser
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

import tokenformer_jax
from tokenformer_jax.cli import verbs

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The folder of the site; a warning of Sphinx fails the build."""
  for name in ('furo', 'myst_parser', 'sphinx_copybutton'):
    pytest.importorskip(name, reason='pip install -e ".[docs]" brings Sphinx')
  folder = tmp_path_factory.mktemp('site')
  command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', 'docs', str(folder)]
  done = subprocess.run(
    command, cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return folder


class Page(html.parser.HTMLParser):
  """The links of a page, the files that it loads, and the names that links may end in."""

  def __init__(self, path: Path):
    super().__init__()
    self.links, self.loads, self.anchors = set(), set(), {'', '#'}
    self.feed(path.read_text())

  def handle_starttag(self, tag, attrs):
    found = dict(attrs)
    self.anchors.add(found.get('id'))
    if tag == 'a':
      self.links.add(found.get('href', ''))
    elif tag in ('script', 'img', 'link') and found.get('rel') not in ('next', 'prev', 'search'):
      self.loads.add(found.get('src') or found.get('href') or '')


@pytest.fixture(scope='module')
def pages(site):
  found = {path.name: Page(path) for path in site.glob('*.html')}
  assert len(found) > 15
  return found


def test_every_page_of_docs_is_on_the_site(pages):
  expected = {f'{path.stem}.html' for path in tiny_run.ROOT.glob('docs/*.md')}
  assert expected <= pages.keys()
  listed = {link.partition('#')[0] for link in pages['index.html'].links}
  assert expected - listed - {'index.html'} == set(), 'a page is not in the list of pages'


def test_every_link_inside_the_site_leads_somewhere(site, pages):
  for name, page in pages.items():
    for link in page.links:
      path, _, anchor = link.partition('#')
      if '://' in link or link.startswith('mailto:'):
        continue
      target = path or name
      assert (site / target).exists(), f'{name}: {link}'
      assert target not in pages or anchor in pages[target].anchors, f'{name}: {link}'


def test_pages_load_only_local_files(site, pages):
  for name, page in pages.items():
    assert not [file for file in page.loads if '//' in file], name
  for file in site.glob('_static/**/*.css'):
    text = file.read_text()
    assert 'url(http' not in text and '@import' not in text, file


def test_the_public_names_and_the_help_are_on_the_site(site, pages):
  anchors = pages['api.html'].anchors
  for name in tokenformer_jax.__all__:
    found = [one for one in anchors if one and one.startswith(f'tokenformer_jax.{name}')]
    assert found, f'{name} has no entry'
  assert 'tokenformer_jax.Run.generate' in anchors, 'the methods of a run'
  flags = (site / 'flags.html').read_text()
  assert {*verbs.VERBS} <= pages['flags.html'].anchors
  assert 'optim.schedule.kind=cosine' in flags and '--param_tokens' in flags


def test_docstrings_show_examples_as_code_and_plain_types(site):
  api = (site / 'api.html').read_text()
  assert 'Annotated' not in api
  assert api.count('<div class="highlight">') > 10, 'examples are running text'
