"""Runs that earlier code of today's format wrote continue, grow and tell their history as then.

The figures were computed by the code that wrote the runs, on one CPU. Another CPU, or other flags
of XLA, round otherwise: logits and losses agree to about a part in a million. The tests ask for
1e-5, far less than the effect of a lost moment, a wrong position in the data or another scale.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from stored_runs import measure

from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs.saved_config import FORMAT


def _each(*names: str):
  marks = {name: [pytest.mark.slow] * (name != 'trained') for name in names}
  folders = [
    pytest.param(measure.HERE / f'format_{FORMAT}' / name, id=name, marks=marks[name])
    for name in names
  ]
  return pytest.mark.parametrize('folder', folders)


EACH_RUN = _each('trained', 'vit', 'frozen', 'grown', 'converted', 'dense')


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """The current directory, in which the data is found, and one device."""
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  monkeypatch.chdir(tmp_path)
  return tmp_path


def unpack(folder):
  wanted = json.loads((folder / 'expected.json').read_text())
  return measure.unpack(folder / 'run.tar.xz', Path()), wanted


@EACH_RUN
def test_a_stored_run_continues_with_the_same_losses(folder):
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
def test_a_stored_run_has_the_same_facts_and_history(folder):
  run, wanted = unpack(folder)
  assert measure.facts(run) == wanted['facts']
  assert measure.history(run) == wanted['history'], 'its lineage is read as another one'


@EACH_RUN
def test_a_stored_run_computes_the_same(folder):
  run, wanted = unpack(folder)
  np.testing.assert_allclose(measure.logits(run), wanted['logits'], rtol=1e-5, atol=1e-5)


@_each('vit', 'frozen', 'dense')
def test_a_stored_run_grows_exactly(folder):
  run, wanted = unpack(folder)
  np.testing.assert_allclose(measure.grown_logits(run), wanted['logits'], rtol=1e-5, atol=1e-5)
