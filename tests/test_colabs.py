"""The notebooks, run from top to bottom, in a directory of their own."""

from pathlib import Path

import nbclient
import nbformat
import pytest

COLABS = sorted((Path(__file__).parent.parent / 'colabs').glob('*.ipynb'))
PICTURES = {'grow': 1, 'inspect': 4, 'vit': 2}


@pytest.mark.slow
@pytest.mark.parametrize('path', COLABS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')  # one device, as on a laptop
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook, timeout=1200, resources={'metadata': {'path': str(tmp_path)}}
  )
  client.execute()
  shown = [len([o for o in cell.get('outputs', []) if _is_picture(o)]) for cell in notebook.cells]
  assert max(shown) == 1, f'a cell shows its picture {max(shown)} times'
  assert sum(shown) == PICTURES[path.stem], 'a picture is not in the notebook'


def _is_picture(output) -> bool:
  return 'image/png' in output.get('data', {})
