"""The notebooks, run from top to bottom, in a directory of their own."""

from pathlib import Path

import nbclient
import nbformat
import pytest

COLABS = sorted((Path(__file__).parent.parent / 'colabs').glob('*.ipynb'))


@pytest.mark.slow
@pytest.mark.parametrize('path', COLABS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')  # one device, as on a laptop
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook, timeout=1200, resources={'metadata': {'path': str(tmp_path)}}
  )
  client.execute()
