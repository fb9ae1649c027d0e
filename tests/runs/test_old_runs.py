"""Runs that earlier formats wrote go on, grow and say where they come from as they did then.

The figures were computed by the code of the format, on one CPU. Another CPU, or other flags of XLA,
round otherwise: logits and losses agree to about a part in a million, and 1e-5 is asked for. That
is far less than a lost moment, a wrong position in the data or another scale would change.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from old_runs import measure

from tokenformer_jax.config import migrate
from tokenformer_jax.parallel import devices

RUNS = sorted(file.parent for file in measure.HERE.glob('format_*/*/expected.json'))


def _is_quick(folder):
  """Whether the quick tests read a run: one of each format, and some more of the newest."""
  newest = folder.parent == RUNS[-1].parent
  return folder.name == 'trained' or (newest and folder.name in ('vit', 'frozen'))


EACH_RUN = pytest.mark.parametrize(
  'folder',
  [
    pytest.param(
      folder,
      id=f'{folder.parent.name}-{folder.name}',
      marks=[pytest.mark.slow] * (not _is_quick(folder)),
    )
    for folder in RUNS
  ],
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """The current directory, in which the data is found, and one device."""
  monkeypatch.setattr(devices, 'find', lambda: jax.devices()[:1])
  monkeypatch.chdir(tmp_path)
  return tmp_path


def unpack(folder):
  wanted = json.loads((folder / 'expected.json').read_text())
  return measure.unpack(folder / 'run.tar.xz', Path()), wanted


@pytest.mark.parametrize('number', range(1, migrate.FORMAT))
def test_runs_of_every_earlier_format_are_kept(number):
  kept = {folder.name for folder in RUNS if folder.parent.name == f'format_{number}'}
  missing = {'trained', 'grown', 'frozen', 'converted', 'vit', 'dense'} - kept
  assert not missing, f'no test shows that runs of format {number} can be read'


@EACH_RUN
def test_an_old_run_goes_on_with_the_same_losses(folder):
  run, wanted = unpack(folder)
  measure.write_data()
  losses = measure.next_losses(run)
  assert losses.keys() == wanted['losses'].keys(), 'it does not go on from its checkpoint'
  np.testing.assert_allclose(
    list(losses.values()),
    list(wanted['losses'].values()),
    rtol=1e-5,
    err_msg='it goes on otherwise than the code that wrote it did',
  )


@EACH_RUN
def test_an_old_run_says_what_it_is(folder):
  run, wanted = unpack(folder)
  assert measure.facts(run) == wanted['facts']
  assert measure.history(run) == wanted['history'], 'its lineage is read as another one'


@EACH_RUN
def test_an_old_run_computes_what_it_did_and_grows_exactly(folder):
  run, wanted = unpack(folder)
  found = {'the run': measure.logits(run), 'grown, it': measure.grown_logits(run)}
  for name, logits in found.items():
    np.testing.assert_allclose(
      logits,
      wanted['logits'],
      rtol=1e-5,
      atol=1e-5,
      err_msg=f'{name} computes something else than the code that wrote it did',
    )
