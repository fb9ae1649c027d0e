"""The notebooks: how their first cells get the code, and each run from top to bottom."""

import functools
import re
import tomllib

import nbclient
import nbformat
import pytest
import tiny_run
import xla_flags
from packaging import requirements

COLABS = sorted((tiny_run.ROOT / 'colabs').glob('*.ipynb'))
PICTURES = {'chat': 1, 'grow': 1, 'inspect': 4, 'transformers': 1, 'vit': 2}
NEEDS = {'transformers': ('torch', 'transformers', 'peft')}
SMALLER = {  # text of a notebook, and what runs in its place
  'chat': [
    ('steps=600, log_every=200', 'steps=4, log_every=2'),
    ('  600,\n', '  4,\n'),
    ('warmup_steps=50', 'warmup_steps=1'),
    ('for country in CAPITALS}\nright', "for country in ['Chile', 'Peru']}\nright"),
  ],
  'grow': [
    (
      'steps=1000, log_every=250, eval_every=100, eval_batches=64',
      'steps=5, log_every=5, eval_every=5, eval_batches=2',
    ),
    ('medium.train(1500)', 'medium.train(10)'),
    ('.train(2000)', '.train(15)'),
    ("decayed') for run in stable]", "decayed') for run in stable[-1:]]"),
    ('warmup_steps=50', 'warmup_steps=1'),
  ],
  'transformers': [
    ('steps=600, log_every=200', 'steps=4, log_every=2'),
    ('    600,\n', '    4,\n'),
    ('  200,\n', '  6,\n'),
    ("'log_every': 100", "'log_every': 2"),
    ('warmup_steps=50', 'warmup_steps=1'),
    ("'warmup_steps': 50", "'warmup_steps': 1"),
    ("{'warmup_steps': 10}", "{'warmup_steps': 1}"),
    ('length=24', 'length=4'),
    ('max_new_tokens=24', 'max_new_tokens=4'),
    ('  for name in facts:\n', '  for name in [*facts][:2]:\n'),
    ('in facts.items()\n  ]', 'in [*facts.items()][:2]\n  ]'),
  ],
}


def _shorten(notebook, smaller: list[tuple[str, str]]) -> None:
  """Replace texts in the cells of a notebook; a text that no cell has fails."""
  for text, replacement in smaller:
    cells = [cell for cell in notebook.cells if text in cell.source]
    assert cells, f'no cell has {text}'
    for cell in cells:
      cell.source = cell.source.replace(text, replacement)


# In the place of the first cell, which tests/test_package.py runs: what `for_all_tests` does.
BEGIN = f"""
import gc
import sys

gc.set_threshold(100_000, 20, 100)
sys.path.append('{tiny_run.ROOT}/tests/support')

import shared_programs

sharing = shared_programs.shared()
sharing.__enter__()
"""


def _run(name: str, smaller: list[tuple[str, str]], folder, monkeypatch) -> None:
  for package in NEEDS.get(name, ()):
    pytest.importorskip(package)
  monkeypatch.setenv('XLA_FLAGS', xla_flags.join_flags(devices=1))  # as on a laptop
  notebook = nbformat.read(tiny_run.ROOT / 'colabs' / f'{name}.ipynb', as_version=4)
  if smaller:
    _shorten(notebook, smaller)
    notebook.cells[1].source = BEGIN
  client = nbclient.NotebookClient(
    notebook, timeout=1200, resources={'metadata': {'path': str(folder)}}
  )
  client.execute()
  shown = [len([o for o in cell.get('outputs', []) if _is_picture(o)]) for cell in notebook.cells]
  assert max(shown) == 1, f'a cell shows its picture {max(shown)} times'
  assert sum(shown) == PICTURES[name], 'a picture is not in the notebook'


@pytest.mark.slow
@pytest.mark.parametrize('name', SMALLER)
def test_a_notebook_runs_with_few_steps(name, tmp_path, monkeypatch):
  _run(name, SMALLER[name], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.full_size
@pytest.mark.parametrize('name', PICTURES)
def test_a_whole_notebook_runs(name, tmp_path, monkeypatch):
  _run(name, [], tmp_path, monkeypatch)


@pytest.mark.parametrize('path', COLABS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_a_whole_run(path):
  cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == 'code']
  assert not [cell.id for cell in cells if 'print(' in cell.source and not cell.outputs]
  shown = [output for cell in cells for output in cell.outputs if _is_picture(output)]
  assert len(shown) == PICTURES[path.stem]
  said = nbformat.writes(nbformat.v4.new_notebook(cells=[*cells]))
  found = re.findall(r'/(?:root|home|work)\b[^"\\]*|Traceback.*', said)
  assert not found, 'an output has a path of a machine, or an error'


def _is_picture(output) -> bool:
  return 'image/png' in output.get('data', {})


@functools.cache
def _cells(name: str) -> dict[str, str]:
  path = tiny_run.ROOT / 'colabs' / f'{name}.ipynb'
  return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


def test_the_first_cells_are_the_same_but_for_the_extras():
  found = set()
  for path in COLABS:
    cells = _cells(path.stem)
    assert [*cells][1:3] == ['install', 'see-device'], f'{path}: the package is not installed first'
    found.add((re.sub(r'\[[\w,]+\]', '', cells['install']), cells['see-device']))
  assert len(found) == 1, 'a mended cell was not copied to the other notebooks'


def test_the_extras_of_the_first_cells_exist():
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  for path in COLABS:
    (extras,) = re.findall(r"'tokenformer_jax\[([\w,]+)\]'", _cells(path.stem)['install'])
    assert {*extras.split(',')} <= {*project['optional-dependencies']}, path


def test_no_extra_of_the_notebooks_brings_a_kernel():
  """The session of a hosted runtime has loaded its own, which pip would replace."""
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  assert not [need for need in project['optional-dependencies']['colab'] if 'ipython' in need]
  assert not [need for need in project['optional-dependencies']['colab'] if 'ipykernel' in need]


LOADED = {'jinja2', 'matplotlib', 'numpy', 'pillow', 'scikit-learn'}


def test_a_hosted_session_keeps_what_it_may_have_loaded():
  lines = (tiny_run.ROOT / 'colabs' / 'hosted.txt').read_text().lower().splitlines()
  hosted = dict(line.split('==') for line in lines if not line.startswith('#'))
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  needs = [*project['dependencies'], *project['optional-dependencies']['colab']]
  kept = {need.name.lower(): need.specifier for need in map(requirements.Requirement, needs)}
  replaced = [name for name in LOADED if hosted[name] not in kept[name]]
  assert not replaced, 'the first cell would ask for a restart'
