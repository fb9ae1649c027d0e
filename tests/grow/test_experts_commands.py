"""The commands that add experts to a run, take them out, and keep those that are used."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from grow_commands import SEEN, first_state, meta_of, read, write_run
from grow_commands import grow as command
from growing import STEP
from outcomes import assert_same

from tokenformer_jax.config import BiasBalanceConfig, RouterConfig
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.training import loop

SLOW = pytest.mark.slow  # because whole commands compile two models each
SPARSE = ('--experts=4', '--expert_tokens=16')
MIXTURE = {
  'model__layer__ffn__kind': 'experts',
  'model__layer__ffn__tokens': 512,  # of a Pattention, which this is not
  'model__layer__ffn__count': 4,
  'model__layer__ffn__expert__kind': 'pattention',
  'model__layer__ffn__expert__tokens': 16,
  'model__layer__ffn__shared__kind': 'pattention',
  'model__layer__ffn__shared__tokens': 64,
}
DENSE = {key.replace('.', '__'): value for key, value in tiny_run.DENSE.items()}


@pytest.fixture(scope='module')
def base(tmp_path_factory, source):
  """A run of a TokenFormer, as after training."""
  directory = tmp_path_factory.mktemp('base') / 'base'
  write_run(directory, source, directory.parent / 'cache')
  return directory


@pytest.fixture(scope='module')
def mixture(tmp_path_factory, source):
  """A run of a sparse Pattention, as after training."""
  directory = tmp_path_factory.mktemp('mixture') / 'mixture'
  write_run(directory, source, directory.parent / 'cache', **MIXTURE)
  return directory


@SLOW
def test_a_dense_run_gets_routed_experts_and_loses_them_again(
  base, source, tmp_path, capsys, one_device
):
  command(f'--source={base}', f'--target={tmp_path / "grown"}', *SPARSE, '--top_k=2')
  said = ''.join(capsys.readouterr())
  assert 'exact: the grown model computes what the source does' in said
  assert 'ffn experts' in said
  meta = meta_of(tmp_path / 'grown')
  ffn = meta.config.model.layer.ffn
  assert (ffn.count, ffn.expert.tokens, ffn.shared.tokens, ffn.router.top_k) == (4, 16, 64, 2)
  assert meta.step == STEP and meta.lineage[-1].model.layer.ffn.kind == 'pattention'

  command('groups', f'--source={tmp_path / "grown"}')
  lines = capsys.readouterr().out.splitlines()
  assert 'ffn.expert (tokens:τ², 4 experts)' in lines[0]
  assert f'{base} from' in lines[1] and '64:64' in lines[1], 'the shared part is taken for new'
  assert '16:16' in lines[2] and f'{tmp_path}/grown from step {STEP}' in lines[2]

  command('remove', f'--source={tmp_path / "grown"}', f'--target={tmp_path / "back"}')
  assert_same(read(tmp_path / 'back'), read(base), 'what was there before the growth')
  assert meta_of(tmp_path / 'back').config.model == meta_of(base).config.model

  changes = {'init_from': str(base), 'train__steps': STEP + 1, **MIXTURE}
  changes['model__layer__ffn__router__top_k'] = 2
  config = tiny_run.config(source, tmp_path / 'cache', **changes)
  state, step = first_state(config, tmp_path / 'run')
  assert step == STEP
  grown = read(tmp_path / 'grown')['params']
  assert_same(state['params'], grown, 'a config with init_from grows in another way')


@SLOW
def test_shrink_keeps_the_experts_that_are_used(mixture, tmp_path, capsys, one_device):
  """A router that never chooses experts 1 and 3 of the first layer, nor 2 and 3 of the second."""
  unused = np.array([[0, 2], [1, 2]])
  steered = tmp_path / 'steered'
  _write_with_bias(mixture, steered, unused)
  command('shrink', f'--source={steered}', f'--target={tmp_path / "small"}', '--experts=2')
  said = ''.join(capsys.readouterr())
  assert 'the experts that go have 0.0% of the choices' in said
  old, new = (read(run)['params']['blocks']['ffn'] for run in (steered, tmp_path / 'small'))
  for layer, kept in enumerate(([1, 3], [0, 3])):
    np.testing.assert_array_equal(
      new['experts']['keys'][layer], np.asarray(old['experts']['keys'])[layer][kept]
    )
  assert meta_of(tmp_path / 'small').lineage[-1].action == 'shrink'


def _write_with_bias(source, target, unused):
  """Write the run with a router that is balanced by a bias, which is low for some experts."""
  meta, state = meta_of(source), read(source)
  model = meta.config.model
  ffn = dataclasses.replace(
    model.layer.ffn, balance=BiasBalanceConfig(), router=RouterConfig('sigmoid')
  )
  layer = dataclasses.replace(model.layer, ffn=ffn)
  config = dataclasses.replace(meta.config, model=dataclasses.replace(model, layer=layer))

  def with_bias(tree, values):
    router = tree['blocks']['ffn']['router'] | {'bias': values}
    of_ffn = tree['blocks']['ffn'] | {'router': router}
    return tree | {'blocks': tree['blocks'] | {'ffn': of_ffn}}

  bias = np.zeros((2, 4), np.float32)
  np.put_along_axis(bias, unused, -9.0, axis=1)
  clipped, *others = state['opt_state']
  nothing, adam = clipped
  zero = np.zeros_like(bias)
  adam = adam._replace(mu=with_bias(adam.mu, zero), nu=with_bias(adam.nu, zero))
  state = state | {
    'params': with_bias(state['params'], bias),
    'opt_state': ((nothing, adam), *others),
  }
  checkpoints = checkpoint.Checkpoints(target, keep=1)
  changed = dataclasses.replace(meta, config=config, seen=SEEN)
  checkpoints.save(changed, jax.tree.map(jax.numpy.asarray, state))
  checkpoints.wait()
  checkpoints.close()


@SLOW
def test_named_experts_are_taken_out(mixture, tmp_path, capsys, one_device):
  command('remove', f'--source={mixture}', f'--target={tmp_path / "fewer"}', '--experts=1,3')
  assert 'the loss is' in ''.join(capsys.readouterr())
  old, new = (read(run)['params']['blocks']['ffn'] for run in (mixture, tmp_path / 'fewer'))
  np.testing.assert_array_equal(
    new['experts']['keys'], np.asarray(old['experts']['keys'])[:, [1, 3]]
  )
  meta = meta_of(tmp_path / 'fewer')
  assert (meta.lineage[-1].action, meta.lineage[-1].experts) == ('remove', '1 3')


@SLOW
def test_a_grown_run_resumes_bit_for_bit_on_a_mesh(base, tmp_path, capsys):
  grown, again = (tmp_path / name for name in ('one', 'again'))
  command(f'--source={base}', f'--target={grown}', *SPARSE, '--mesh=fsdp=2,experts=2,tokens=2')
  assert 'exact: the grown' in ''.join(capsys.readouterr())
  config = meta_of(grown).config
  train = dataclasses.replace(config.train, steps=STEP + 4, checkpoint_every=2)
  config = dataclasses.replace(config, train=train)
  loop.train(config, grown)
  shutil.copytree(grown, again)
  shutil.rmtree(again / f'checkpoints/{STEP + 4}')
  loop.train(config, again)
  assert f'going on after step {STEP + 2}' in ''.join(capsys.readouterr())
  one, other = map(read, (grown, again))
  assert int(one['step']) == STEP + 4
  assert_same(one, other, 'a run that stopped and went on')
  assert np.asarray(one['params']['blocks']['ffn']['experts']['values']).any()
