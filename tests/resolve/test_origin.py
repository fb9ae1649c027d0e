"""What a run keeps of the checkpoint that it goes on from: tokenizer, classes, place in data."""

import contextlib
import dataclasses
import shutil

import image_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_chats
import tiny_run
from outcomes import assert_same
from tiny_run import begun, prepared
from written_runs import save_run

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, SourceConfig, Sources, TextConfig
from tokenformer_jax.config.mixture import source_configs
from tokenformer_jax.data import order, store, tokenizers
from tokenformer_jax.data.mixture import make_stores
from tokenformer_jax.errors import UserError
from tokenformer_jax.resolve import checks
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.resolve.lengths import order_changes
from tokenformer_jax.runs.checkpoint_meta import Meta, Seen
from tokenformer_jax.tasks.text import TextTask
from tokenformer_jax.training import notices

pytestmark = pytest.mark.usefixtures('one_device')

STEP, BATCH = 10, 8  # of the checkpoint of `save_run`


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """The folder of two corpora of other words, each with another `bpe:280`."""
  return tiny_run.write_two_corpora(tmp_path_factory.mktemp('texts'))


def source_of(texts, name='old'):
  return f'files:{texts}/{name}/*.txt'


@pytest.fixture
def make(texts):
  """Builds configs on a corpus with a trained tokenizer."""
  base = {'source': source_of(texts), 'cache': texts / 'cache'}
  options = {'data__tokenizer': 'bpe:280', 'train__steps': 40}
  return lambda **changes: tiny_run.config(**{**base, **options, **changes})


@pytest.fixture
def other_text(texts):
  return source_of(texts, 'new')


def from_run(config, workdir, **grow):
  """The config, to start from a run."""
  grown = dataclasses.replace(config.grow, **grow)
  return dataclasses.replace(config, init_from=str(workdir), grow=grown)


def refusal(config, workdir):
  with pytest.raises(UserError) as error:
    prepared(config, workdir)
  return str(error.value)


# The id.


def test_a_run_keeps_its_id_and_another_run_gets_its_own(make, tmp_path):
  saved = save_run(make(), tmp_path / 'run')
  assert prepared(make(), tmp_path / 'run').origin.run == saved.run
  others = {prepared(make(), tmp_path / 'new').origin.run for _ in range(2)}
  others.add(prepared(from_run(make(), tmp_path / 'run'), tmp_path / 'next').origin.run)
  assert len(others - {saved.run, ''}) == 3


# The tokenizer.


def test_a_model_keeps_its_tokenizer_whatever_text_it_reads(make, other_text, tmp_path):
  trained = save_run(make(), tmp_path / 'run').tokenizer
  config = make(source=other_text)
  resumed = prepared(config, tmp_path / 'run')
  for run in (resumed, prepared(from_run(config, tmp_path / 'run'), tmp_path / 'next')):
    assert run.task.vocabulary() == trained, 'other text changes what the ids mean'
  store_of_run = resumed.task._data.stores['']
  ids = np.asarray(store_of_run.train[:50])
  assert 'zebra' in tokenizers.from_json(trained).decode(ids), 'the text was not encoded with it'
  own = store.prepare(config.data).tokenizer  # another run, from scratch, trains one
  assert own.fingerprint != store_of_run.tokenizer.fingerprint


def test_another_tokenizer_is_refused_before_any_text_is_read(make, tmp_path, monkeypatch):
  kept = save_run(make(), tmp_path / 'run')
  file = tmp_path / 'other.json'
  file.write_text(tokenizers.train_bpe(['a b c'] * 9, 270)._tokenizer.to_str())
  monkeypatch.setattr(TextTask, 'prepare', lambda self: pytest.fail('the text was read'))
  fingerprint = tokenizers.from_json(kept.tokenizer).fingerprint
  for spec in ('bytes', 'bpe:281', str(file)):
    sentence = refusal(make(data__tokenizer=spec), tmp_path / 'run')
    assert f'config.data.tokenizer is {spec!r}' in sentence, f'{spec} is taken for the tokenizer'
    assert f"('bpe:280', fingerprint {fingerprint}" in sentence
    assert 'set config.data.tokenizer=bpe:280' in sentence, 'the sentence does not say what to do'


def test_a_tokenizer_from_a_file_is_known_by_its_content(make, tmp_path):
  file, copy = tmp_path / 'tokenizer.json', tmp_path / 'copy.json'
  file.write_text(tokenizers.train_bpe(['some words of a text'] * 9, 270)._tokenizer.to_str())
  shutil.copy(file, copy)
  config = make(data__tokenizer=str(file))
  trained = save_run(config, tmp_path / 'run').tokenizer
  assert prepared(make(data__tokenizer=str(copy)), tmp_path / 'run').task.vocabulary() == trained
  file.write_text(tokenizers.train_bpe(['other words'] * 9, 270)._tokenizer.to_str())
  assert 'move the file away' in refusal(config, tmp_path / 'run'), 'a changed file is taken'
  file.unlink()
  assert prepared(config, tmp_path / 'run').task.vocabulary() == trained, (
    'a run needs the file, though its checkpoint holds the tokenizer'
  )


def test_a_store_is_not_built_again_for_the_tokenizer_that_is_kept(
  make, other_text, tmp_path, capsys
):
  config = make(cache=tmp_path / 'cache')
  save_run(config, tmp_path / 'run')
  first = store.prepare(config.data).path
  capsys.readouterr()
  assert prepared(config, tmp_path / 'run').task._data.stores[''].path == first, (
    'a resumed run tokenizes again'
  )
  other = make(source=other_text, cache=tmp_path / 'cache')
  paths = {prepared(other, tmp_path / 'run').task._data.stores[''].path for _ in range(2)}
  assert len(paths) == 1
  assert capsys.readouterr().err.count('tokenizing') == 1, 'every start tokenizes the text'


def test_models_are_compared_on_text_in_their_own_tokens(make, other_text, tmp_path):
  """Not on those of a store that another run of the same config made with its own tokenizer."""
  config = make(source=other_text, cache=tmp_path / 'cache')
  store.prepare(config.data)
  trained = save_run(make(), tmp_path / 'run').tokenizer
  task = tasks.make(complete(config))
  rows, name = task.held_out(trained, 2)
  assert name.endswith('text of the Python standard library'), 'the wrong store is used'
  made = store.prepare(config.data, tokenizers.from_json(trained))
  rows, name = task.held_out(trained, 2)
  assert name.endswith('held-out text of the run')
  np.testing.assert_array_equal(rows.ravel(), made.validation[: rows.size])


def test_the_vocabulary_and_the_positions_are_those_of_the_model(make, tmp_path):
  save_run(make(model__vocab_size=512, model__max_length=100), tmp_path / 'run')
  config = make(data__sequence_length=16)
  model = prepared(from_run(config, tmp_path / 'run'), tmp_path / 'next').config.model
  assert (model.vocab_size, model.max_length) == (512, 100), 'the sizes are made up anew'
  learned = {
    'model__position_embedding': 'learned',
    'model__layer__mixer__positions__kind': 'none',
  }
  save_run(make(**learned), tmp_path / 'learned')
  longer = from_run(make(**learned, data__sequence_length=64), tmp_path / 'learned')
  assert 'has learned positions for 32 tokens' in refusal(longer, tmp_path / 'next')


# What can be known without the data.


def test_another_model_is_refused_before_any_text_is_read(make, tmp_path, monkeypatch):
  save_run(make(), tmp_path / 'run')
  monkeypatch.setattr(TextTask, 'prepare', lambda self: pytest.fail('the text was read'))
  sentence = refusal(make(model__width=64), tmp_path / 'run')
  assert 'is of another model: model.width is 32 there and 64 in the config' in sentence


def test_a_model_that_would_be_drawn_otherwise_is_the_same_model(make, tmp_path):
  save_run(make(), tmp_path / 'run')
  prepared(make(model__init__std=0.5), tmp_path / 'run')


@pytest.mark.parametrize('kind', ['lm', 'vit'])
def test_a_model_of_another_kind_is_refused_by_its_kind(make, tmp_path, kind):
  configs = {'lm': make(), 'vit': tiny_run.vit_config()}
  other = 'vit' if kind == 'lm' else 'lm'
  for name, config in configs.items():
    save_run(config, tmp_path / name)
  config = from_run(configs[kind], tmp_path / other)
  if kind == 'lm':
    distill = dataclasses.replace(config.distill, teacher=str(tmp_path / 'lm'))
    config = dataclasses.replace(config, distill=distill)
  assert f'model.kind is {other!r} in the source' in refusal(config, tmp_path / 'next')
  assert f'model.kind is {other!r} there' in refusal(configs[kind], tmp_path / other)


# The place in the data.


def test_a_resumed_run_may_have_another_batch_size(make, tmp_path):
  save_run(make(), tmp_path / 'run')
  run = prepared(make(data__batch_size=16), tmp_path / 'run')
  assert run.position == order.Position(STEP, STEP * BATCH), 'samples are skipped or repeated'
  with contextlib.closing(run.task.train_batches(range(16), STEP, STEP + 1, run.position)) as rows:
    batch = next(rows)
  tokens, seed, length = run.task._data.stores[''].train, run.config.train.seed, 32
  n = order.window_count(tokens, length)
  for row, tokens_of_row in enumerate(batch):
    sample = order.sample_index(seed, STEP * BATCH + row, n)
    np.testing.assert_array_equal(
      tokens_of_row, tokens[sample * length : sample * length + length + 1], 'another sample'
    )


def state_of(run):
  """A whole state of a run, of random numbers."""
  abstract, rng = run.program.abstract_state(run.mesh), np.random.default_rng(0)
  state = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), abstract)
  return {**state, 'step': jnp.asarray(STEP), 'skipped': jnp.asarray(0)}


def test_a_start_from_another_run_has_its_state(make, tmp_path):
  state = state_of(prepared(make(), tmp_path / 'nothing'))
  save_run(make(), tmp_path / 'run', state=state)
  for how, wanted in (('keep', STEP), ('restart', 0)):
    _, got, first = begun(from_run(make(), tmp_path / 'run', step=how), tmp_path / how)
    assert_same(got['params'], state['params'], how)
    assert (first, int(got['step'])) == (wanted, wanted)
    if how == 'keep':
      assert_same(got, state, 'the whole state')


def test_the_position_is_that_of_the_readable_checkpoint(make, tmp_path):
  config = make()
  state = state_of(prepared(config, tmp_path / 'nothing'))
  digest = save_run(config, tmp_path / 'run', step=5, state=state).seen.digest
  save_run(config, tmp_path / 'run', step=8, state=state, seen=Seen(88, digest))
  shutil.rmtree(tmp_path / 'run/checkpoints/8/state')
  run, _, first = begun(config, tmp_path / 'run')
  assert (first, run.position) == (5, order.Position(5, 40)), 'samples are skipped'


def test_a_run_that_starts_from_another_goes_on_in_its_data(make, other_text, tmp_path):
  meta = save_run(make(), tmp_path / 'run')
  save_run(
    make(), tmp_path / 'run', step=20, seen=Seen(200, meta.seen.digest)
  )  # of two batch sizes

  def position(config, **grow):
    return prepared(from_run(config, tmp_path / 'run', **grow), tmp_path / 'next').position

  assert position(make(data__batch_size=4)) == order.Position(20, 200)
  assert position(make(), step='restart') == order.Position(0, 0)
  assert position(make(source=other_text)) == order.Position(20, 0), 'other text is skipped'
  assert position(make(train__seed=1)) == order.Position(20, 0)
  assert position(make(data__new_order_at=20)) == order.Position(20, 0)


def test_another_order_of_the_data_is_refused_unless_it_is_asked_for(make, tmp_path, monkeypatch):
  save_run(make(), tmp_path / 'run')
  for key, old, new in (('train.seed', 0, 1), ('data.sequence_length', 32, 16)):
    changed = {key.replace('.', '__'): new}
    with monkeypatch.context() as patch:
      patch.setattr(TextTask, 'prepare', lambda self: pytest.fail('the text was read'))
      sentence = refusal(make(**changed), tmp_path / 'run')
    assert f'config.{key} is {new} and was {old}' in sentence
    assert 'has seen 80 samples' in sentence and 'set config.data.new_order_at=10' in sentence
    run = prepared(make(**changed, data__new_order_at=10), tmp_path / 'run')
    assert run.position == order.Position(10, 0), 'a new order does not begin with its first sample'
  assert 'new_order_at=10' in refusal(make(train__seed=1, data__new_order_at=9), tmp_path / 'run')


def test_a_template_or_packing_that_changed_is_named(make, tmp_path):
  keys = {f'data__{key}': value for key, value in short_chats.write(tmp_path).items()}
  keys['source'] = keys.pop('data__source')
  config = make(**keys)
  save_run(config, tmp_path / 'run')
  sentence = refusal(make(**{**keys, 'data__packing': 'best_fit'}), tmp_path / 'run')
  assert "config.data.packing is 'best_fit' and was 'cut'" in sentence
  file = tmp_path / 'short.jinja'
  file.write_text(file.read_text().replace('?', '!'))
  sentence = refusal(config, tmp_path / 'run')
  assert f'config.data.chat_template={file} has other content than it had' in sentence
  file.rename(tmp_path / 'other.jinja')
  sentence = refusal(
    make(**{**keys, 'data__chat_template': str(tmp_path / 'other.jinja')}), tmp_path / 'run'
  )
  assert f"config.data.chat_template is '{tmp_path}/other.jinja' and was '{file}'" in sentence


def test_points_behind_the_checkpoint_are_no_other_order():
  def mixed(old, **data):
    new = ' '.join(f'{step}:{1 - float(w):g}' for step, w in (p.split(':') for p in old.split()))
    points = {'old': old, 'new': new}
    of_both = {name: SourceConfig(name, weight_by_step=text) for name, text in points.items()}
    return Config(data=TextConfig(mixture=Sources(of_both), **data))

  config = mixed('0:0.5 100:0.9', batch_size=8)
  meta = Meta(50, config, {}, seen=Seen(400, 'content'))

  def changes(config, digests=('content', 'with weights')):
    return order_changes(config, meta, digests)

  further = mixed('0:0.5 100:0.9 2000:0.1', batch_size=8, batch_size_by_step='0:8 60:8')
  assert changes(further) == []
  assert changes(mixed('0:0.5 50:0.9', batch_size=8)) == []
  old, _ = changes(mixed('0:0.5 49:0.9', batch_size=8))
  assert old.startswith("config.data.mixture.old.weight_by_step is '0:0.5 49:0.9' and was '0:0.5 1")
  assert changes(mixed('0:0.5 100:0.9', batch_size=16)) == [
    'config.data.batch_size is 16 and was 8'
  ]
  # An earlier version stored one digest of content and weights.
  assert len(changes(further, ('another',))) == 2 and 'weight_by_step' in changes(further, 'a')[0]
  assert 'has other content' in changes(config, ('another',))[0]


def test_text_that_changed_under_its_name_is_refused_unless_it_is_asked_for(texts, make, tmp_path):
  own = source_of(shutil.copytree(texts, tmp_path / 'own'))
  save_run(make(source=own), tmp_path / 'run')
  (tmp_path / 'own/old/0.txt').write_text('def grow ' * 200)
  sentence = refusal(make(source=own), tmp_path / 'run')
  assert 'has other content than it had' in sentence and 'config.data.new_order_at=10' in sentence
  asked = prepared(make(source=own, data__new_order_at=10), tmp_path / 'run')
  assert asked.position == order.Position(10, 0)
  # The checkpoints that follow are of the new order, which is not begun a second time.
  save_run(make(source=own), tmp_path / 'run', step=15, seen=Seen(40, asked.task.digests[0]))
  again = prepared(make(source=own, data__new_order_at=10), tmp_path / 'run')
  assert again.position == order.Position(15, 40)


def test_another_source_is_asked_for_by_its_name(texts, make, other_text, tmp_path):
  save_run(make(), tmp_path / 'run')
  config = make(source=other_text)
  assert prepared(config, tmp_path / 'run').position == order.Position(10, 0)
  moved = make(source=source_of(shutil.copytree(texts, tmp_path / 'moved')))
  assert prepared(moved, tmp_path / 'run').position == order.Position(10, 80), (
    'the same text at another place is not known again'
  )


# What is said.


def said(run, capsys):
  capsys.readouterr()
  notices.say_changes(run)
  return capsys.readouterr().err.splitlines()


def test_keys_that_differ_are_said_in_one_line(make, tmp_path, capsys):
  config = make()
  save_run(config, tmp_path / 'run')
  assert said(prepared(config, tmp_path / 'run'), capsys) == [], 'a plain resume is not silent'
  changes = {'optim__learning_rate': 1e-4, 'data__batch_size': 16, 'train__steps': 50}
  silent = {'train__log_every': 1, 'data__prefetch': 2, 'train__checkpoint_every': 7}
  changed = make(**changes, **silent, init_from=str(tmp_path / 'nothing'))
  (line,) = said(prepared(changed, tmp_path / 'run'), capsys)
  assert line == (
    'different from step 10 on: data.batch_size: 8 -> 16; optim.learning_rate: 0.003 -> 0.0001; '
    f'train.steps: 40 -> 50; init_from={tmp_path}/nothing is ignored, because there is a checkpoint'
  )


def test_a_start_from_another_run_names_it_and_what_grows(make, tmp_path, capsys):
  save_run(make(), tmp_path / 'run')

  def line(config):
    (first,) = said(prepared(config, tmp_path / 'next'), capsys)
    return first

  start = f'starting with the model of {tmp_path}/run, step 10 (its parameters'
  same = from_run(make(), tmp_path / 'run')
  assert line(same) == f'{start} and optimizer state); it does not grow'
  tuned = from_run(make(), f'{tmp_path}/run@10', step='restart', moments='drop')
  assert line(tuned) == f'{start} alone, from step 0 on); it does not grow'
  larger = from_run(make(model__layer__ffn__tokens=96), tmp_path / 'run')
  assert line(larger) == (
    f'{start} and optimizer state); it grows: model.layer.ffn.tokens: 64 -> 96; '
    'model.layer.ffn.groups: (64:64,) -> (64:64, 32:32); 36,928 -> 41,024 parameters'
  )


def test_other_settings_of_a_finished_run_are_refused(make, tmp_path):
  save_run(make(), tmp_path / 'run', step=40)

  def check(config):
    run = prepared(config, tmp_path / 'run')
    checks.check_finished(run.config, run.origin)

  check(make(train__steps=30, train__log_every=1))
  many = make()
  mesh = dataclasses.replace(many.mesh, fsdp=1)
  check(dataclasses.replace(many, mesh=mesh))
  with pytest.raises(UserError) as error:
    check(make(optim__learning_rate=1e-4, init_from=str(tmp_path / 'nothing')))
  assert str(error.value) == (
    'the checkpoint of step 40 in this work directory has made config.train.steps=40 steps '
    'already, so none would be made with what differs from its settings (optim.learning_rate: '
    f'0.003 -> 0.0001; init_from={tmp_path}/nothing is ignored, because there is a checkpoint); '
    'choose workdir=NEW_DIR to train a new run, or raise config.train.steps to go on with this '
    'one'
  )


@pytest.mark.parametrize('content', ['the same', 'other'])
def test_a_store_of_a_mixture_is_known_by_its_content(texts, make, tmp_path, content, capsys):
  other_text = source_of(shutil.copytree(texts, tmp_path / 'own'), 'new')

  def mixed(text, **stores):
    config, sources = make(), {'a': make().data.source, 'b': text}
    entries = {
      name: SourceConfig(source, store=str(stores.get(name, '')), weight=0.5)
      for name, source in sources.items()
    }
    return dataclasses.replace(
      config, data=dataclasses.replace(config.data, mixture=Sources(entries))
    )

  made = make_stores(mixed(other_text).data, str(tmp_path / 'made'))
  save_run(mixed(other_text, **{name: one.path for name, one in made.items()}), tmp_path / 'run')
  (tmp_path / 'made').rename(tmp_path / 'moved')
  moved = {name: tmp_path / 'moved' / name for name in made}
  if content == 'other':
    shutil.rmtree(moved['b'])
    (tmp_path / 'own/new/0.txt').write_text('more zebras ' * 50)
    store.make(source_configs(mixed(other_text, **moved).data)['b'], made['b'].tokenizer)
    found = refusal(mixed(other_text, **moved), tmp_path / 'run')
    assert 'a source of config.data.mixture has other content than it had' in found
    return
  config, reached = mixed(other_text, **moved), order.Position(STEP, STEP * BATCH)
  run = prepared(config, tmp_path / 'run')
  assert run.position == reached, 'a store that was moved is other data'
  assert said(run, capsys) == [], 'its path is called a setting that differs'
  assert prepared(from_run(config, tmp_path / 'run'), tmp_path / 'next').position == reached


# The classes of images.


@pytest.fixture
def sets(tmp_path):
  """Two sets of images of three classes each, with other names."""
  sources = []
  for names in (('ant', 'bee', 'cat'), ('ant', 'dog', 'emu')):
    root = tmp_path / '-'.join(names)
    image_files.write_classes(root / 'train', names, 12)
    image_files.write_classes(root / 'val', names, 7)
    sources.append(f'folder:{root}')
  return sources


def test_a_classifier_is_not_resumed_on_other_classes(sets, tmp_path):
  save_run(tiny_run.vit_config(data__source=sets[0]), tmp_path / 'run')
  sentence = refusal(tiny_run.vit_config(data__source=sets[1]), tmp_path / 'run')
  assert "2 of its 3 classes stand for something else in the data: class 1 is 'dog'" in sentence
  assert "was trained with 'bee'" in sentence and 'config.init_from=DIR' in sentence


@pytest.mark.slow
def test_a_classifier_gets_a_new_head_for_as_many_other_classes(sets, tmp_path, capsys):
  config = tiny_run.vit_config(data__source=sets[0])
  run = prepared(config, tmp_path / 'nothing')
  old = state_of(run)
  save_run(config, tmp_path / 'run', step=3, state=old)
  heads = []
  for source in sets:
    changed = tiny_run.vit_config(data__source=source, init_from=str(tmp_path / 'run'))
    _, state, _ = begun(changed, tmp_path / 'next')
    heads.append(np.asarray(state['params']['head']['kernel']))
    blocks = (state['params']['blocks'], old['params']['blocks'])
    assert all(map(np.array_equal, *map(jax.tree.leaves, blocks))), 'more than the head is new'
  kept = np.asarray(old['params']['head']['kernel'])
  np.testing.assert_array_equal(heads[0], kept, 'the head is new though the classes are the same')
  assert np.all(heads[1] != kept), 'the head of other classes is kept'
  err = capsys.readouterr().err
  assert err.count('adapting') == 1 and 'a new head, because 2 of its 3 classes' in err
