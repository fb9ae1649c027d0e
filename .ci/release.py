"""The steps of a release that are edits and builds; docs/release.md has all steps.

  python .ci/release.py prepare VERSION ADDRESS    write both, and the date, where they belong
  python .ci/release.py build FOLDER               build and check the sdist and the wheel of HEAD

ADDRESS is that of the repository, such as https://HOST/OWNER/NAME.
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

# What README.md says before and after the first release.
RELEASED = (
  (
    'pip install -e . && python train.py          #',
    'pip install tokenformer_jax && tokenformer train   #',
  ),
  (
    '; until there is a release, upload the wheel that `pip wheel --no-deps .` makes. In a',
    '. In a',
  ),
)


def prepare(version: str, address: str) -> None:
  """Write the version, the date and the address of a release into the files that name them."""
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  if not re.fullmatch(r'\d+\.\d+\.\d+', version) or not address.startswith('https://'):
    sys.exit(f'error: {version} is not like 1.2.3, or {address} does not begin with https://')
  _edit('tokenformer_jax/__init__.py', r"__version__ = '.*?'", f"__version__ = '{version}'")
  _edit('CHANGELOG.md', rf'## \[({re.escape(version)}|Unreleased)\].*', f'## [{version}] - {today}')
  _edit('CITATION.cff', r'(?m)^version: .*', f'version: {version}')
  _edit('CITATION.cff', r'(?m)^(date-released|repository-code): .*\n', '', least=0)
  released = f'date-released: {today}\nrepository-code: {address}\nlicense:'
  _edit('CITATION.cff', r'(?m)^license:', released)
  _edit('pyproject.toml', r'(?m)^Repository = .*\n', '', least=0)
  _edit('pyproject.toml', r'(?m)^Paper = .*', rf'\g<0>\nRepository = "{address}"')
  if hub := re.fullmatch(r'https://github\.com/(.+)', address):  # what Colab opens
    for path in sorted((ROOT / 'colabs').glob('*.ipynb')):
      where = f'https://colab.research.google.com/github/{hub[1]}/blob/main/colabs/{path.name}'
      badge = f'    "[![Open in Colab]({BADGE})]({where})\\\\n",\n    "\\\\n",\n'
      old = r'(?:    "\[!\[Open in Colab.*\n    "\\n",\n)?'
      _edit(f'colabs/{path.name}', rf'(    "# .*\n    "\\n",\n){old}', rf'\g<1>{badge}')
  first = RELEASED[0][0] in (ROOT / 'README.md').read_text()
  for before, after in RELEASED if first else ():
    _edit('README.md', r'\s+'.join(map(re.escape, before.split(' '))), after)  # in any line breaks


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
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  if 'Repository' not in project['urls']:
    sys.exit('error: pyproject.toml names no Repository; run `.ci/release.py prepare` first')
  version = re.search(r"__version__ = '(.*)'", (ROOT / 'tokenformer_jax/__init__.py').read_text())[
    1
  ]
  with tempfile.TemporaryDirectory() as scratch:
    _run('git', 'worktree', 'add', '--quiet', '--detach', scratch, cwd=ROOT)
    try:
      readme = Path(scratch, 'README.md')
      readme.write_text(link_to(f'{project["urls"]["Repository"]}', version, readme.read_text()))
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
    case ['prepare', version, address]:
      prepare(version, address)
    case ['build', folder]:
      build(folder)
    case _:
      sys.exit(__doc__)
