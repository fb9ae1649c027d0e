"""The folders of the package are layers: no import runs back up."""

import ast

import tiny_run

PACKAGE = tiny_run.ROOT / 'tokenformer_jax'
# Lowest first: each may import those before it, and the modules that stand below all folders.
LAYERS = (
  'config',
  'storage',
  'parallel',
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
  'convert',
)
BELOW = {'arguments', 'errors', 'messages'}
COMMAND_LINE = {'cli', 'flag_mistakes', 'usage'}
OF_COMMANDS = {'command', '__main__', 'verify', 'keys'}  # files in folders


def _imports(path):
  """Return what a file imports at run time from the package, as (`folder or module`, `name`)."""
  tree = ast.parse(path.read_text())
  for_types = {
    inner
    for node in ast.walk(tree)
    if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING'
    for inner in ast.walk(node)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node not in for_types and node.module:
      package, *inner = node.module.split('.')
      if package == PACKAGE.name:
        yield from ((inner or [alias.name])[0] for alias in node.names)


def test_every_folder_has_a_layer():
  folders = {path.parent.relative_to(PACKAGE).parts[:1] for path in PACKAGE.rglob('*.py')}
  found = {parts[0] for parts in folders if parts} - {'inspect'}  # which is a command only
  assert found == set(LAYERS), 'say in LAYERS where the folder stands'


def test_no_import_runs_back_up():
  up = []
  for rank, folder in enumerate(LAYERS):
    for path in sorted((PACKAGE / folder).rglob('*.py')):
      may = {*LAYERS[: rank + 1], *BELOW}
      may |= COMMAND_LINE if path.stem in OF_COMMANDS else set()
      up += [f'{path.relative_to(PACKAGE)} → {name}' for name in _imports(path) if name not in may]
  assert not up, f'these files import what is built on them: {up}'
