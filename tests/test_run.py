"""Runs from Python: what a notebook calls gives what the commands give, and compiles once."""

import contextlib
import dataclasses
import io
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_run
import written_runs
from compilations import compilations
from tiny import large_params

import tokenformer_jax
from tokenformer_jax import plan
from tokenformer_jax.cli.generate import read_requests
from tokenformer_jax.config import with_references
from tokenformer_jax.config.groups import frozen_numbers
from tokenformer_jax.decoding.sampling import Sampling
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops

pytestmark = pytest.mark.usefixtures('one_device_in_module')
LARGER = {'qkv': 48, 'ffn': 96}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  return tmp_path_factory.mktemp('runs')


@pytest.fixture(scope='module')
def run(home):
  """A language model of bytes after 20 steps."""
  config = tiny_run.config(tiny_run.write_corpus(home / 'corpus'), home / 'cache')
  return tokenformer_jax.train(config, home / 'run')


@pytest.fixture(scope='module')
def growth(run, home):
  """The grown run, and what was said when it grew."""
  with contextlib.redirect_stderr(io.StringIO()) as said:
    return run.grow(home / 'grown', LARGER), said.getvalue()


@pytest.fixture(scope='module')
def grown(growth):
  return growth[0]


@pytest.fixture(scope='module')
def vit(home):
  return tokenformer_jax.train(tiny_run.vit_config(), home / 'vit')


# The namespace


@pytest.mark.parametrize(
  ('imports', 'chips', 'platform'),
  [('tokenformer_jax', [], 'cpu'), ('tokenformer_jax', ['/dev/accel0'], ''), ('jax', [], 'cpu')],
)
def test_libtpu_is_left_out_where_there_is_no_accelerator(imports, chips, platform, tmp_path):
  """It may be installed for the planner, and prints five lines of errors when JAX starts it."""
  (tmp_path / 'libtpu').mkdir()
  (tmp_path / 'libtpu/__init__.py').touch()
  (tmp_path / 'jax.py').write_text(
    'class config:\n'
    '  jax_platforms = None\n'
    '  update = lambda name, value: setattr(config, name, value)\n'
  )
  code = (
    'import glob, os, sys; from importlib import metadata;'
    f'glob.glob = lambda pattern: {chips} if "accel" in pattern else [];'
    'metadata.entry_points = lambda group: [];'
    f'import {imports}, tokenformer_jax; jax = sys.modules.get("jax");'
    'print(jax.config.jax_platforms if jax else os.environ.get("JAX_PLATFORMS", ""))'
  )
  environment = {**tiny_run.environment(), 'PYTHONPATH': f'{tmp_path}:{tiny_run.ROOT}'}
  del environment['JAX_PLATFORMS']
  command = [sys.executable, '-c', code]
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert (done.stdout, done.stderr) == (f'{platform}\n', ''), done


def test_every_name_is_there_and_no_other():
  assert all(getattr(tokenformer_jax, name) is not None for name in tokenformer_jax.__all__)
  with pytest.raises(AttributeError, match="'tokenformer_jax' has no attribute 'lod'"):
    tokenformer_jax.lod  # noqa: B018


def test_a_plan_can_be_asked_for_again_and_again():
  """The function and the package share a name, which importing a file of the package binds."""
  for _ in range(2):
    with pytest.raises(UserError, match='is not a known chip'):
      tokenformer_jax.plan('lm_stdlib', 'a100:8')
    assert tokenformer_jax.plan is plan


# A run


def test_a_run_says_what_it_is(run, home):
  assert repr(run) == (
    f'<Run {home}/run@20: a language model of 2 layers × 32, {run.parameter_count:,} parameters>'
  )
  assert run.step == 20 and run.config.train.steps == 20
  assert run.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(run.parameters))
  assert run.tokenizer.decode(run.tokenizer.encode('naïve')) == 'naïve'
  assert [line['step'] for line in run.metrics()][:2] == [5, 10]


def test_a_step_can_be_named(run, home):
  assert tokenformer_jax.load(f'{home}/run@15').step == 15
  with pytest.raises(UserError, match='has no checkpoint of step 7'):
    tokenformer_jax.load(f'{home}/run@7')
  with pytest.raises(UserError, match='is not the work directory of a run'):
    tokenformer_jax.load(home)


def test_a_text_for_a_text_and_a_list_for_a_list(run):
  one = run.generate('def', length=6, temperature=0)
  assert isinstance(one, str)
  assert run.generate(['def'], length=6, temperature=0) == [one]
  assert run.generate('def', length=6, temperature=0, stop=[one[2]]) == one[: one.index(one[2])]


def test_texts_are_those_of_the_command(run, tmp_path):
  (tmp_path / 'requests.jsonl').write_text('{"prompt": "def", "length": 6, "seed": 3}\n')
  requests = read_requests(tmp_path / 'requests.jsonl', TextRequest('', sampling=Sampling()))
  ((text, _),) = run._writer.write(requests)
  assert run.generate('def', length=6, seed=3) == text


def test_logits_are_those_of_the_model(run):
  ids, targets = run.held_out(2)
  logits = run.logits(ids)
  assert logits.shape == (*ids.shape, run.config.model.vocab_size) and logits.dtype == np.float32
  np.testing.assert_array_equal(ids[:, 1:], targets[:, :-1], 'targets are not the next tokens')
  nats = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
  nats -= np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  assert abs(nats.mean() - run.evaluate()['loss']) < 0.5, 'the logits are of another model'


def test_the_greedy_token_has_the_largest_logit(run):
  first = run.generate('def', length=1, temperature=0)
  assert run.tokenizer.decode([int(run.logits('def')[0, -1].argmax())]) == first


def test_a_shorter_text_ends_in_nan_and_changes_nothing(run):
  short, both = run.logits('de'), run.logits(['de', 'define'])
  assert short.shape[1] == 3 and both.shape[1] == 7, 'a document begins with its end of the last'
  np.testing.assert_allclose(both[0, :3], short[0], atol=1e-5)
  assert np.isnan(both[0, 3:]).all() and np.isfinite(both[1]).all()


@pytest.mark.slow
def test_padding_takes_no_places_of_experts(home):
  dispatch = {'kind': 'capacity', 'eval_factor': 1.0, 'least': 1}
  ffn = {'kind': 'experts', 'count': 4, 'expert': {'kind': 'mlp', 'width': 8}, 'dispatch': dispatch}
  config = tiny_run.config('stdlib', home, model__layer__ffn=ffn, model__vocab_size=256)
  config = dataclasses.replace(config, model=with_references(config.model))
  written = written_runs.write_params(home / 'experts', config, large_params(config.model))
  run = tokenformer_jax.load(written)
  short, both = run.logits('define'), run.logits(['define', 'define a function of' * 3])
  np.testing.assert_allclose(both[0, : short.shape[1]], short[0], atol=1e-5)


@pytest.mark.full_size
@pytest.mark.slow
def test_the_second_call_compiles_nothing(run):
  def calls():
    run.generate(['def', 'x'], length=4)
    run.logits(['def f(x):'])
    run.maps('def', [0, 1])
    run.usage(tokens=300)
    run.evaluate()
    run.evaluate(['some words, and some more'])

  calls()
  with compilations() as names:
    calls()
  assert not names, f'compiled again: {names}'


@pytest.mark.full_size
@pytest.mark.slow
def test_distances_can_be_clipped(run):
  ids, _ = run.held_out(2)
  want = run.logits(ids)
  np.testing.assert_allclose(run.logits(ids, clip_positions=ids.shape[1]), want, atol=1e-5)
  assert np.abs(run.logits(ids, clip_positions=4) - want).max() > 1e-5, 'the clip has no effect'
  np.testing.assert_array_equal(run.logits(ids), want, 'the clip stays')
  first = run.generate('def f(x', length=1, temperature=0, clip_positions=4)
  logits = run.logits('def f(x', clip_positions=4)[0, -1]
  assert run.tokenizer.decode([int(logits.argmax())]) == first
  text = ['some words, and many more of them']
  figures = run.evaluate(text, max_length=40, clip_positions=4)
  assert figures['window'] == 40 and figures['loss'] != run.evaluate(text, max_length=40)['loss']
  assert run.evaluate(clip_positions=32)['loss'] == pytest.approx(run.evaluate()['loss'], abs=1e-5)


def test_a_text_ends_at_the_most_tokens(run):
  free = run.generate('def', length=20, temperature=0)
  assert run.generate('def', length=20, temperature=0, max_length=9) == free[:5]


def test_figures_are_flat(run):
  assert set(run.evaluate()) == {'loss', 'perplexity', 'bits_per_byte', 'accuracy'}
  last = [line for line in run.metrics() if 'eval/loss' in line][-1]
  assert run.evaluate()['loss'] == pytest.approx(last['eval/loss'], rel=1e-5), 'another split'
  found = run.evaluate(['words of a text'])
  assert found['bytes'] == 15 and found['bits_per_byte'] > 0


# Growth and training


def test_growth_is_exact_and_says_so(run, growth):
  grown, said = growth
  ids, _ = run.held_out(8)
  before, after = run.logits(ids, exact=True), grown.logits(ids, exact=True)
  assert np.abs(before - after).max() < 1e-5, 'the grown model computes something else'
  assert grown.parameters['blocks']['ffn']['keys'].shape[1] == 96
  assert (grown.step, grown.config.model.layer.mixer.proj.tokens) == (20, 32)
  of_layer = {'query': 32, 'key': 32, 'value': 32, 'proj': 32, 'ffn': 64}
  assert grown.old_tokens == {0: of_layer, 1: of_layer}
  assert run.old_tokens is None, 'a run that has not grown has old tokens'
  assert 'exact: the grown model computes what the source does' in said, said
  assert 'ffn tokens' in said, 'the table of what changes is not shown'


def test_a_grown_run_says_which_groups_it_has_and_what_a_step_costs(run, grown):
  last = grown.group_table().splitlines()[-1]
  assert last.startswith('2 ') and '16:16' in last and str(grown.directory) in last, last
  for one in (run, grown):
    tokens = one.config.data.batch_size * one.config.data.sequence_length
    assert one.step_flops == tokens * flops.train_flops(one.config.model, 32)
  assert grown.step_flops > run.step_flops


@pytest.mark.slow
def test_a_run_goes_on_where_it_is(grown, tmp_path):
  shutil.copytree(grown.directory, tmp_path / 'own')
  own = tokenformer_jax.load(tmp_path / 'own')
  more = own.train(24, optim={'learning_rate': 1e-3})
  assert (more.step, more.directory) == (24, own.directory)
  assert more.config.optim.learning_rate == 1e-3
  with pytest.raises(UserError, match=r'own@20 is not the newest .* step 24; name another'):
    own.train(30)


@pytest.mark.slow
def test_groups_are_handled_from_python(run, grown, home):
  """The second group is that of the growth."""
  without, half = grown.remove(home / 'without', [2]), grown.scale(home / 'half', [2], 0.5)
  for one in (without, grown.slice(home / 'first', 1)):
    assert one.config.model == run.config.model, one.directory
    assert one.meta.lineage[-1].groups == '2', 'the lineage names other groups'
  assert len(half.group_table().splitlines()) == 3
  frozen = grown.freeze(home / 'frozen_group', [1])
  assert frozen_numbers(frozen.config.model) == (1,)
  assert frozen.freeze(home / 'thawed', []).config.model == grown.config.model
  grown.extract(home / 'group', [2])
  merged = run.merge(home / 'group', home / 'from_group')
  assert merged.config.model == grown.config.model


@pytest.mark.slow
def test_a_run_begins_another_one_and_grows_on_the_way(run, home):
  model = {'layer': {'ffn': {'tokens': 80}}}
  frozen = run.train(22, workdir=home / 'frozen', model=model, optim={'old_tokens': 'freeze'})
  assert frozen.config.init_from == run.source and frozen.step == 22
  larger = frozen.grow(home / 'at_this_rate', {'ffn': 96}, rate=1)
  assert larger.config.optim.learning_rate == frozen.config.optim.learning_rate
  old, new = (r.parameters['blocks']['ffn']['keys'] for r in (run, frozen))
  np.testing.assert_array_equal(new[:, :64], old, 'old tokens moved')
  frozen.extract(home / 'added')
  merged = run.merge(home / 'added', home / 'merged')
  np.testing.assert_array_equal(merged.parameters['blocks']['ffn']['keys'], new)
  removed = frozen.remove(home / 'removed')
  np.testing.assert_array_equal(removed.parameters['blocks']['ffn']['keys'], old)
  assert frozen.shrink(home / 'less', {'ffn': 40}).config.model.layer.ffn.tokens == 40


@pytest.mark.slow
def test_a_run_gets_layers_and_loses_them_again(run, home, capsys):
  deeper = run.grow(home / 'deeper', {'ffn': 80}, layers=4, place='behind')
  said = capsys.readouterr().err
  assert 'exact: the grown model computes what the source does' in said, said
  ids, _ = run.held_out(8)
  before, after = run.logits(ids, exact=True), deeper.logits(ids, exact=True)
  assert np.abs(before - after).max() < 1e-5, 'the deeper model computes something else'
  assert [layer['ffn'] for layer in deeper.old_tokens.values()] == [64, 64, 0, 0]
  removed = deeper.remove(home / 'shallow')
  assert removed.config.model == run.config.model
  values = removed.parameters['blocks']['ffn']['values']
  np.testing.assert_array_equal(values, run.parameters['blocks']['ffn']['values'])


# Looking at it


def test_maps_have_a_row_for_each_token(run):
  maps = run.maps('def x')
  assert run.labels('def x') == ['⟨end⟩', *'def·x'] and sorted(maps) == [0, 1]
  assert {kind: map_TxN.shape for kind, map_TxN in maps[1].items()} == {
    **dict.fromkeys(('query', 'key', 'value', 'proj'), (6, 32)),
    'ffn': (6, 64),
  }
  assert run.usage('some words', tokens=8)[0]['ffn'].positions == 8


def test_figures_are_drawn(run, tmp_path):
  shutil.copytree(run.directory, tmp_path / 'other')
  drawn = run.plot(beside=[tokenformer_jax.load(tmp_path / 'other')])
  assert [text.get_text() for text in drawn.axes[0].get_legend().get_texts()][:2] == [
    'run',
    'other',
  ]
  assert len(run.plot_maps('def x', [1]).axes) >= 5


def test_a_missing_library_is_named_before_anything_is_computed(run, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  monkeypatch.setattr(run, '_model', None)
  with pytest.raises(UserError, match=r'matplotlib, .* is not installed; run pip .*"\.\[plot\]"'):
    run.plot_maps('def')


# Images


@pytest.mark.full_size
@pytest.mark.slow
def test_a_classifier_predicts_grows_and_trains_on(vit, home):
  images, labels = vit.held_out(20)
  logits = vit.logits(images)
  assert logits.shape == (20, 10) and vit.classes == [str(i) for i in range(10)]
  grown = vit.grow(home / 'vit_grown', {'ffn': 96})
  exact = vit.logits(images, exact=True)
  assert np.abs(grown.logits(images, exact=True) - exact).max() < 1e-5
  assert (logits.argmax(axis=1) == exact.argmax(axis=1)).mean() > 0.9
  assert {'accuracy', 'loss', 'images'} <= set(vit.evaluate())
  assert labels.shape == (20,) and grown.train(22).step == 22
