"""`.ci/release.py`: the edits of a release, and the files that are published."""

import datetime
import re
import subprocess
import sys
import tomllib
import zipfile

import nbformat
import packages
import pytest
import tiny_run
import yaml

ADDRESS = 'https://github.com/owner/name'
CHANGED = ('CHANGELOG.md', 'CITATION.cff', 'README.md')


@pytest.fixture
def checkout(tmp_path):
  """A copy of the checkout, which a release changes."""
  return packages.copy_checkout(tmp_path / 'checkout', '.ci/release.py', 'CITATION.cff', 'colabs')


def release(checkout, *arguments):
  command = [sys.executable, '.ci/release.py', *arguments]
  return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_a_release_is_the_same_in_all_files(checkout):
  before = (checkout / 'README.md').read_text()
  assert '\npip install -e . && python train.py ' in before, 'it lies before the release'
  done = release(checkout, 'prepare', '1.2.3', ADDRESS)
  assert done.returncode == 0, done.stderr
  today = datetime.datetime.now(datetime.UTC).date()
  citation = yaml.safe_load((checkout / 'CITATION.cff').read_text())
  assert (citation['version'], citation['date-released']) == ('1.2.3', today)
  assert citation['repository-code'] == ADDRESS
  project = tomllib.loads((checkout / 'pyproject.toml').read_text())['project']
  assert project['urls']['Repository'] == ADDRESS
  assert "__version__ = '1.2.3'" in (checkout / 'tokenformer_jax/__init__.py').read_text()
  assert f'\n## [1.2.3] - {today}\n' in (checkout / 'CHANGELOG.md').read_text()
  after = (checkout / 'README.md').read_text()
  assert '\npip install tokenformer_jax && tokenformer train ' in after
  assert 'until there is a release' not in after


def test_a_second_release_changes_no_more_than_version_and_date(checkout):
  release(checkout, 'prepare', '1.2.3', ADDRESS)
  unchanged = [
    checkout / 'README.md',
    checkout / 'pyproject.toml',
    *checkout.glob('colabs/*.ipynb'),
  ]
  first = {path: path.read_text() for path in unchanged}
  changes = (checkout / 'CHANGELOG.md').read_text().replace('## [', '## [Unreleased]\n\n## [', 1)
  (checkout / 'CHANGELOG.md').write_text(changes)
  done = release(checkout, 'prepare', '1.3.0', ADDRESS)
  assert done.returncode == 0, done.stderr
  assert {path: path.read_text() for path in unchanged} == first
  citation = (checkout / 'CITATION.cff').read_text()
  assert citation.count('date-released') == citation.count('repository-code') == 1
  versions = re.findall(r'^## \[(.*?)\]', (checkout / 'CHANGELOG.md').read_text(), re.MULTILINE)
  assert versions == ['1.3.0', '1.2.3']
  for path in checkout.glob('colabs/*.ipynb'):
    title, empty, badge, *rest = nbformat.read(path, as_version=4).cells[0].source.splitlines()
    assert (title[:2], empty, rest[0]) == ('# ', '', '')
    assert badge.endswith(
      f'(https://colab.research.google.com/github/owner/name/blob/main/colabs/{path.name})'
    )


@pytest.mark.parametrize('arguments', [('1.2', ADDRESS), ('1.2.3', 'host/owner/name')])
def test_a_wrong_version_or_address_changes_nothing(arguments, checkout):
  done = release(checkout, 'prepare', *arguments)
  assert done.returncode == 1 and done.stderr.startswith('error: '), done.stderr
  for name in CHANGED:
    assert (checkout / name).read_text() == (tiny_run.ROOT / name).read_text()


@pytest.mark.slow
def test_the_published_page_links_to_the_tag(checkout):
  pytest.importorskip('build', reason='pip install -e ".[release]" brings build')
  pytest.importorskip('twine', reason='pip install -e ".[release]" brings twine')
  git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b']
  subprocess.run([*git, 'init', '--quiet'], cwd=checkout, check=True)
  (checkout / '.gitignore').write_text('dist/\n')
  refused = release(checkout, 'build', 'dist')
  assert 'the checkout has changes' in refused.stderr
  release(checkout, 'prepare', '1.2.3', ADDRESS)
  subprocess.run([*git, 'add', '--all'], cwd=checkout, check=True)
  subprocess.run([*git, 'commit', '--quiet', '--message=1.2.3'], cwd=checkout, check=True)
  done = release(checkout, 'build', 'dist')
  assert done.returncode == 0 and done.stdout.count('PASSED') == 2, done.stdout + done.stderr
  (wheel,) = (checkout / 'dist').glob('*.whl')
  with zipfile.ZipFile(wheel) as archive:
    page = archive.read('tokenformer_jax-1.2.3.dist-info/METADATA').decode()
  assert f'![bits per byte against steps]({ADDRESS}/raw/v1.2.3/docs/loss.png)' in page
  assert not re.findall(r'\]\((?!https?:|#)', page), 'a link leads nowhere on the index page'
