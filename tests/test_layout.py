"""The folders of the package are layers: no import runs back up."""

import ast
import functools
import graphlib
import re
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
  'resolve',
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


# Packages that are slow to import, or installed by an extra: only what needs them imports them.
SLOW = {
  *('apache_beam', 'datasets', 'jinja2', 'lm_eval', 'matplotlib', 'mlflow', 'pandas', 'plotly'),
  *('pyarrow', 'sklearn', 'tensorboardX', 'tensorflow', 'tensorflow_datasets', 'torch', 'trackio'),
  *('huggingface_hub', 'transformers', 'wandb'),
}


IMPORT = re.compile(r'^ *from tokenformer_jax\.?([\w.]*) import (\([^)]*\)|.*)', re.MULTILINE)


@functools.cache
def _imports(path):
  """Return what a file imports from the package, without its name."""
  return [
    f'{package}.{name}'.lstrip('.')
    for package, names in IMPORT.findall(path.read_text())
    for name in re.findall(r'(\w+)(?: as \w+)?', re.sub('#.*', '', names))
  ]


def _prints(path):
  """Return whether a file prints to standard output."""
  text = path.read_text()
  return 'print(' in text and any(
    isinstance(node, ast.Call)
    and getattr(node.func, 'id', '') == 'print'
    and 'file' not in (keyword.arg for keyword in node.keywords)
    for node in ast.walk(ast.parse(text))
  )


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
      up += [
        f'{path.relative_to(PACKAGE)} → {name}'
        for name in _imports(path)
        if name.split('.')[0] not in may
      ]
  assert not up, f'these files import what is built on them: {up}'


def test_no_imports_make_a_circle():
  files = {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('.__init__'): path
    for path in PACKAGE.rglob('*.py')
  }
  graph = {
    module: {name if name in files else name.rpartition('.')[0] for name in _imports(path)}
    for module, path in files.items()
  }
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    pytest.fail(f'these files import each other: {" ← ".join(error.args[1])}')


def test_only_commands_print_to_standard_output():
  files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob('*.py') if _prints(path)]
  printing = [str(file) for file in files if file.parts[0] != 'cli']
  assert not printing, f'these files print, and are no commands: {printing}'


@pytest.mark.slow
def test_a_fresh_run_imports_only_what_it_needs(tmp_path):
  """The tools around a run, and packages that few runs need, are imported by what needs them."""
  code = (
    'import sys, pathlib, tiny_run\n'
    'from tokenformer_jax.training import loop\n'
    'folder = pathlib.Path(sys.argv[1])\n'
    'source = tiny_run.write_corpus(folder / "text")\n'
    'loop.train(tiny_run.config(source, folder / "cache"), folder / "run")\n'
    'print(*sys.modules)\n'
  )
  here = f'{PACKAGE.parent}:{PACKAGE.parent}/tests/support'
  environment = {**tiny_run.environment(), 'PYTHONPATH': here}
  command = [sys.executable, '-c', code, str(tmp_path)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  names = [name.split('.') for name in done.stdout.splitlines()[-1].split()]
  tools = {'convert', 'laws', 'inspection', 'plan', 'family', 'report', 'cli', 'api'}
  assert not tools & {name[1] for name in names if name[0] == PACKAGE.name and len(name) > 1}
  assert not SLOW & {name[0] for name in names}
