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


def files_with_the_address(checkout):
  return {
    path: path.read_text()
    for name in ('README.md', 'pyproject.toml', 'CITATION.cff', 'colabs/*.ipynb')
    for path in checkout.glob(name)
  }


def test_no_file_shows_an_address_that_nobody_has_filled_in(checkout):
  if 'Repository' in tomllib.loads((checkout / 'pyproject.toml').read_text())['project']['urls']:
    pytest.skip('it is filled in')
  for path, text in files_with_the_address(checkout).items():
    assert 'git clone' not in text and 'Open in Colab' not in text, path
  assert release(checkout, 'prepare', '1.2.3').returncode == 1


def test_one_command_writes_the_address_into_all_files(checkout):
  release(checkout, 'address', 'https://github.com/former/place')
  done = release(checkout, 'address', ADDRESS)
  assert done.returncode == 0, done.stderr
  texts = files_with_the_address(checkout)
  assert not [path for path, text in texts.items() if 'former/place' in text]
  project = tomllib.loads((checkout / 'pyproject.toml').read_text())['project']
  assert project['urls']['Repository'] == ADDRESS
  assert project['urls']['Issues'] == f'{ADDRESS}/issues'
  readme = texts[checkout / 'README.md']
  assert f'In a checkout (`git clone {ADDRESS}`):' in readme and 'upload the wheel' not in readme
  for path in checkout.glob('colabs/*.ipynb'):
    opened = f'https://colab.research.google.com/github/owner/name/blob/main/colabs/{path.name}'
    assert readme.count(f'({opened}) [{path.stem}](colabs/{path.name})') == 1
    cells = nbformat.read(path, as_version=4).cells
    title, empty, badge, *rest = cells[0].source.splitlines()
    assert (title[:2], empty, rest[0]) == ('# ', '', '') and badge.endswith(f'({opened})')
    assert f"\nREPOSITORY = '{ADDRESS}'" in cells[1].source
  release(checkout, 'address', ADDRESS)
  assert files_with_the_address(checkout) == texts, 'again it changes nothing'


def test_a_repository_elsewhere_has_no_badges(checkout):
  release(checkout, 'address', 'https://host.example/owner/name')
  texts = files_with_the_address(checkout)
  assert not [path for path, text in texts.items() if 'Open in Colab' in text]


def test_a_release_is_the_same_in_all_files(checkout):
  before = (checkout / 'README.md').read_text()
  assert '\npip install -e . && python train.py ' in before, 'it lies before the release'
  release(checkout, 'address', ADDRESS)
  done = release(checkout, 'prepare', '1.2.3')
  assert done.returncode == 0, done.stderr
  today = datetime.datetime.now(datetime.UTC).date()
  citation = yaml.safe_load((checkout / 'CITATION.cff').read_text())
  assert (citation['version'], citation['date-released']) == ('1.2.3', today)
  assert citation['repository-code'] == ADDRESS
  assert "__version__ = '1.2.3'" in (checkout / 'tokenformer_jax/__init__.py').read_text()
  assert f'\n## [1.2.3] - {today}\n' in (checkout / 'CHANGELOG.md').read_text()
  after = (checkout / 'README.md').read_text()
  assert '\npip install tokenformer_jax && tokenformer train ' in after


def test_a_second_release_changes_no_more_than_version_and_date(checkout):
  release(checkout, 'address', ADDRESS)
  release(checkout, 'prepare', '1.2.3')
  unchanged = [
    checkout / 'README.md',
    checkout / 'pyproject.toml',
    *checkout.glob('colabs/*.ipynb'),
  ]
  first = {path: path.read_text() for path in unchanged}
  changes = (checkout / 'CHANGELOG.md').read_text().replace('## [', '## [Unreleased]\n\n## [', 1)
  (checkout / 'CHANGELOG.md').write_text(changes)
  done = release(checkout, 'prepare', '1.3.0')
  assert done.returncode == 0, done.stderr
  assert {path: path.read_text() for path in unchanged} == first
  citation = (checkout / 'CITATION.cff').read_text()
  assert citation.count('date-released') == citation.count('repository-code') == 1
  versions = re.findall(r'^## \[(.*?)\]', (checkout / 'CHANGELOG.md').read_text(), re.MULTILINE)
  assert versions == ['1.3.0', '1.2.3']


@pytest.mark.parametrize('arguments', [('prepare', '1.2'), ('address', 'host/owner/name')])
def test_a_wrong_version_or_address_changes_nothing(arguments, checkout):
  done = release(checkout, *arguments)
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
  release(checkout, 'address', ADDRESS)
  release(checkout, 'prepare', '1.2.3')
  subprocess.run([*git, 'add', '--all'], cwd=checkout, check=True)
  subprocess.run([*git, 'commit', '--quiet', '--message=1.2.3'], cwd=checkout, check=True)
  done = release(checkout, 'build', 'dist')
  assert done.returncode == 0 and done.stdout.count('PASSED') == 2, done.stdout + done.stderr
  (wheel,) = (checkout / 'dist').glob('*.whl')
  with zipfile.ZipFile(wheel) as archive:
    page = archive.read('tokenformer_jax-1.2.3.dist-info/METADATA').decode()
  assert f'![bits per byte against steps]({ADDRESS}/raw/v1.2.3/docs/loss.png)' in page
  assert not re.findall(r'\]\((?!https?:|#)', page), 'a link leads nowhere on the index page'
