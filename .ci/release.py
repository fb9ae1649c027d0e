"""The steps of a release that are edits and builds; docs/release.md has all steps.

  python .ci/release.py address ADDRESS    write the repository's address where it belongs
  python .ci/release.py prepare VERSION    write the version and the date where they belong
  python .ci/release.py build FOLDER       build and check the sdist and the wheel of HEAD

ADDRESS is such as https://HOST/OWNER/NAME. It is kept in pyproject.toml, as `Repository`.
"""

import datetime
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BADGE = 'https://colab.research.google.com/assets/colab-badge.svg'
LINK = re.compile(r'(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)')

# What README.md says without an address or a release, and what it says with one.
UPLOAD = (
  '; until this repository has an address, upload the wheel that `pip wheel --no-deps .` makes'
)
INSTALL = (
  'pip install -e . && python train.py          #',
  'pip install tokenformer_jax && tokenformer train   #',
)


def write_address(address: str) -> None:
  """Write the address of the repository into the files that name it, over an earlier one."""
  if not re.fullmatch(r'https://[^\s"`]+[^\s"`/]', address):
    sys.exit(f'error: {address} is not like https://HOST/OWNER/NAME')
  hub = re.fullmatch(r'https://github\.com/(.+)', address)
  urls = {'Repository': address}
  if hub:  # whose pages these are
    urls |= {'Issues': f'{address}/issues', 'Changelog': f'{address}/blob/main/CHANGELOG.md'}
  _edit('pyproject.toml', r'(?m)^(Repository|Issues|Changelog) = .*\n', '', least=0)
  lines = ''.join(f'\n{name} = "{url}"' for name, url in urls.items())
  _edit('pyproject.toml', r'(?m)^Paper = .*', rf'\g<0>{lines}')
  _edit('CITATION.cff', r'(?m)^repository-code: .*\n', '', least=0)
  _edit('CITATION.cff', r'(?m)^license:', f'repository-code: {address}\nlicense:')
  _edit(
    'README.md',
    r'(?m)^In a checkout( \(`git clone .*?`\))?:$',
    f'In a checkout (`git clone {address}`):',
  )
  _edit('README.md', r'\s+'.join(map(re.escape, UPLOAD.split(' '))), '', least=0)
  old = r'(?:\[!\[Open in Colab\]\(.*?\)\]\(.*?\) )?'
  for path in sorted((ROOT / 'colabs').glob('*.ipynb')):
    name = f'colabs/{path.name}'
    badge = (
      f'[![Open in Colab]({BADGE})](https://colab.research.google.com/github/{{}}/blob/main/{name})'
    )
    badge = badge.format(hub[1]) if hub else ''
    row = rf'(?m)^\| {old}(?=\[{path.stem}\])'
    _edit('README.md', row, f'| {badge} ' if badge else '| ')
    _edit(name, r'    "\[!\[Open in Colab.*\n    "\\n",\n', '', least=0)
    if badge:
      _edit(name, r'    "# .*\n    "\\n",\n', rf'\g<0>    "{badge}\\n",\n    "\\n",\n')
    _edit(name, r"(\"REPOSITORY = )'.*?'", rf"\g<1>'{address}'")


def prepare(version: str) -> None:
  """Write the version and the date of a release into the files that name them."""
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  if not re.fullmatch(r'\d+\.\d+\.\d+', version):
    sys.exit(f'error: {version} is not like 1.2.3')
  _read_address()
  _edit('tokenformer_jax/__init__.py', r"__version__ = '.*?'", f"__version__ = '{version}'")
  _edit('CHANGELOG.md', rf'## \[({re.escape(version)}|Unreleased)\].*', f'## [{version}] - {today}')
  _edit('CITATION.cff', r'(?m)^version: .*', f'version: {version}')
  _edit('CITATION.cff', r'(?m)^date-released: .*\n', '', least=0)
  _edit('CITATION.cff', r'(?m)^repository-code:', f'date-released: {today}\nrepository-code:')
  before, after = INSTALL
  _edit('README.md', re.escape(before), after, least=0)


def _read_address() -> str:
  """Return the address that pyproject.toml names."""
  urls = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']
  if 'Repository' not in urls:
    sys.exit('error: pyproject.toml names no Repository; run `.ci/release.py address` first')
  return urls['Repository']


def _edit(name: str, pattern: str, replacement: str, least: int = 1) -> None:
  """Replace the first match of a pattern in a file, which must have one if `least` is 1."""
  path = ROOT / name
  text, count = re.subn(pattern, replacement, path.read_text(), count=0 if not least else 1)
  if count < least:
    sys.exit(f'error: {name} has no {pattern}; the text and .ci/release.py must agree')
  path.write_text(text)


def build(folder: str) -> None:
  """Build the sdist and the wheel of HEAD into a folder, and check them as an index does."""
  if _run('git', 'status', '--porcelain', cwd=ROOT):
    sys.exit('error: the checkout has changes; commit them first')
  address = _read_address()
  version = re.search(r"__version__ = '(.*)'", (ROOT / 'tokenformer_jax/__init__.py').read_text())[
    1
  ]
  with tempfile.TemporaryDirectory() as scratch:
    _run('git', 'worktree', 'add', '--quiet', '--detach', scratch, cwd=ROOT)
    try:
      readme = Path(scratch, 'README.md')
      readme.write_text(link_to(address, version, readme.read_text()))
      _run(
        sys.executable, '-m', 'build', '--outdir', str(Path(folder).absolute()), '.', cwd=scratch
      )
    finally:
      _run('git', 'worktree', 'remove', '--force', scratch, cwd=ROOT)
  files = sorted(map(str, Path(folder).glob(f'tokenformer_jax-{version}*')))
  print(_run(sys.executable, '-m', 'twine', 'check', '--strict', *files, cwd='.'))


def link_to(address: str, version: str, readme: str) -> str:
  """Return a README whose links lead to the tagged files: an index shows it far from them."""

  def absolute(link: re.Match[str]) -> str:
    picture, text, target = link.groups()
    return f'{picture}[{text}]({address}/{"raw" if picture else "blob"}/v{version}/{target})'

  return LINK.sub(absolute, readme)


def _run(*command: str, cwd: str | Path) -> str:
  """Return what a command prints; a command that fails ends this program with its output."""
  done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f'error: {" ".join(command)}:\n{done.stdout}{done.stderr}')
  return done.stdout.strip()


if __name__ == '__main__':
  match sys.argv[1:]:
    case ['address', address]:
      write_address(address)
    case ['prepare', version]:
      prepare(version)
    case ['build', folder]:
      build(folder)
    case _:
      sys.exit(__doc__)
