"""The folders of the package are layers: no import runs back up."""

import ast
import subprocess
import sys

import pytest
import tiny_run

PACKAGE = tiny_run.ROOT / 'tokenformer_jax'
# Lowest first: each may import those before it.
LAYERS = (
  'errors',
  'config',
  'storage',
  'parallel',
  'trackers',
  'model',
  'runs',
  'data',
  'decoding',
  'tasks',
  'steps',
  'grow',
  'training',
  'inspection',
  'plan',
  'laws',
  'family',
  'convert',
  'report',
  'api',
  'cli',
  '__main__',
)


def _imports(path):
  """Return the folders and top modules that a file imports, for types or at run time."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      package, *inner = node.module.split('.')
      if package == PACKAGE.name:
        yield from ((inner or [alias.name])[0] for alias in node.names)


def test_every_folder_and_module_at_the_top_has_a_layer():
  found = {path.relative_to(PACKAGE).parts[0].removesuffix('.py') for path in PACKAGE.rglob('*.py')}
  assert found == {*LAYERS, '__init__'}, 'say in LAYERS where the folder stands'


def test_no_import_runs_back_up():
  up = []
  for rank, layer in enumerate(LAYERS):
    folder = PACKAGE / layer
    files = sorted(folder.rglob('*.py')) if folder.is_dir() else [folder.with_suffix('.py')]
    for path in files:
      may = LAYERS[: rank + 1]
      up += [f'{path.relative_to(PACKAGE)} → {name}' for name in _imports(path) if name not in may]
  assert not up, f'these files import what is built on them: {up}'


def test_only_commands_print_to_standard_output():
  printing = [
    str(path.relative_to(PACKAGE))
    for path in sorted(PACKAGE.rglob('*.py'))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'print'
    if not any(keyword.arg == 'file' for keyword in node.keywords)
    if path.relative_to(PACKAGE).parts[0] != 'cli'
  ]
  assert not printing, f'these files print, and are no commands: {printing}'


@pytest.mark.slow
def test_a_fresh_run_imports_only_what_it_needs(tmp_path):
  """Growth, samples and the tools around a run are imported by runs with them."""
  code = (
    'import sys, pathlib, tiny_run\n'
    'from tokenformer_jax.training import loop\n'
    'folder = pathlib.Path(sys.argv[1])\n'
    'source = tiny_run.write_corpus(folder / "text")\n'
    'config = tiny_run.config(source, folder / "cache", train__steps=2)\n'
    'loop.train(config, folder / "run")\n'
    'print(*(name for name in sys.modules if name.startswith("tokenformer_jax.")))\n'
  )
  here = f'{PACKAGE.parent}:{PACKAGE.parent}/tests/support'
  environment = {**tiny_run.environment(), 'PYTHONPATH': here}
  command = [sys.executable, '-c', code, str(tmp_path)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  names = done.stdout.split()
  unneeded = {'grow', 'convert', 'laws', 'inspection', 'plan', 'decoding', 'cli', 'api'}
  assert not [name for name in names if name.split('.')[1] in unneeded]
  assert len(names) <= 110, f'a run needs {len(names)} modules of the package'
