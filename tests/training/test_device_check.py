"""Devices that compute wrong are found and named, and healthy ones change nothing."""

import re
import socket
import sys

import faulty
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hosts
import tiny_run
from outcomes import assert_same, losses

from tokenformer_jax.errors import FaultyDeviceError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.training import device_check, loop

EVERY = 4


def test_one_of_four_devices_is_named():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('fsdp',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
  state = {'params': {'embedding': jax.device_put(np.arange(8.0), rows)}}
  step = jax.jit(lambda state: (state, {}), donate_argnums=0, out_shardings=rows)
  repeated = device_check.Repeated(faulty.with_fault(step, call=4, device=3), mesh)
  state, _ = repeated(4, state)
  with pytest.raises(FaultyDeviceError) as raised:
    repeated(8, state)
  assert str(raised.value).startswith(
    'step 8 was computed twice, and the results differ on 1 of 4 devices: device 3 (cpu) of '
    f'process 0 on {socket.gethostname()} in 1 number; the check of step 4 passed; start the run '
  )


@pytest.mark.slow
def test_a_checked_run_is_the_unchecked_one(make, tmp_path, one_device):
  plain = loop.train(make(), tmp_path / 'plain')
  checked = loop.train(make(train__check_devices=EVERY), tmp_path / 'checked')
  assert_same(checked, plain, 'a run that is checked')
  assert losses(tmp_path / 'checked') == losses(tmp_path / 'plain')


def test_devices_are_named_by_their_own_counts_and_nan_equals_itself():
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('fsdp', 'tokens'))
  places = {
    'split': jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp', 'tokens')),
    'whole': jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
  }
  tree = jax.device_put({'split': jnp.full((8, 8), jnp.nan), 'whole': jnp.arange(3)}, places)
  count = device_check._differences(mesh, tree)
  assert not count(tree, tree).any()
  other = {**tree, 'split': faulty.flip_bit(tree['split'], 3)}
  assert list(count(tree, other)) == [0, 0, 0, 1, 0, 0, 0, 0]
  other = {**other, 'whole': faulty.flip_bit(tree['whole'], 6)}
  assert list(count(tree, other)) == [0, 0, 0, 1, 0, 0, 1, 0], 'copies are not compared one by one'
  zeros = {name: jnp.zeros_like(array) for name, array in tree.items()}
  signs = {name: -array for name, array in zeros.items()}
  assert list(count(zeros, signs)) == [8] * 8, '0 and -0 have other bits'


SCRIPT = """
import sys
import faulty
from tokenformer_jax.cli import train
from tokenformer_jax.steps import fit
make, device = fit.make_train_step, int(sys.argv.pop(1))
fit.make_train_step = lambda *arguments: faulty.with_fault(make(*arguments), 10, device)
train.run()
"""


def command(source, tmp_path, device, **changes):
  """The command of a run whose second computation of step 8 has a wrong bit on a device."""
  words = tiny_run.command(
    source, tmp_path / 'cache', tmp_path / 'run', train__check_devices=EVERY, **changes
  )
  script = [sys.executable, '-c', SCRIPT, str(device), *words[2:]]
  return [*script, f'--faulty_hosts={tmp_path}/faulty']


@pytest.mark.slow
def test_all_of_two_hosts_end_with_the_status_and_name_the_same_device(
  source, tmp_path, monkeypatch
):
  monkeypatch.setenv('NODE_NAME', 'node-7')
  with tiny_hosts.started(command(source, tmp_path, 2, mesh__fsdp=4), 2, devices=2) as running:
    ends = tiny_hosts.ends(running)
  assert [end.status for end in ends] == [hosts.FAULTY_STATUS] * 2, ends[0].err + ends[1].err
  for end in ends:
    (sentence,) = (line for line in end.err.splitlines() if line.startswith('error'))
    assert re.search(r'on 1 of 4 devices: device \d+ \(cpu\) of process 1 on node-7', sentence)
    assert 'Traceback' not in end.err
  assert (tmp_path / 'faulty').read_text() == 'node-7\n'
