"""Released weights in and out: the golden model, the released sizes, and what is refused."""

import dataclasses
import functools
import os
import runpy
import tracemalloc

import jax
import numpy as np
import pytest
import released
import tiny_run
from absl import flags
from tiny import make_optimizer, tiny_model, two_kinds

import tokenformer_jax
from tokenformer_jax import config
from tokenformer_jax.cli import convert, signatures
from tokenformer_jax.config import MeshConfig
from tokenformer_jax.config.groups import choose, first, named_groups
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.convert import export, released_torch, run_tensors, tensor_files
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.steps import step as step_lib

QUERY = 'sequential.2.attention.query.key_param_tokens'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The golden model as a run."""
  directory = tmp_path_factory.mktemp('golden')
  released.write_tokenizer(directory)
  source = released.write(directory / 'model.safetensors')
  to_jax(source, directory / 'run', **released.OPTIONS)
  return directory / 'run'


@pytest.fixture(scope='module')
def restored(run):
  """The whole state that training would go on from, and what it is of."""
  source = checkpoint.open_source(run, None)
  return grow_run.read(source, sharding.make_mesh(MeshConfig())), source.meta


def _meta(workdir):
  return checkpoint.open_source(workdir, None)[1]


def _names(weights):
  return {name: (array.dtype.name, array.tobytes()) for name, array in weights.items()}


def _read(path):
  return {name: tensor.read() for name, tensor in tensor_files.find(path).items()}


def test_golden_logits(restored):
  state, meta = restored
  definition = define_lm(meta.config.model)
  got = jax.jit(lambda p, ids: definition.bind(p)(ids)[0])(
    jax.device_get(state['params']), released.GOLDEN['input_ids']
  )
  np.testing.assert_allclose(
    got, released.GOLDEN['logits'], atol=1e-5, err_msg='the converted model is another one'
  )


def test_the_run_is_described_by_what_was_read(run):
  meta = _meta(run)
  assert (meta.step, meta.updates, meta.lineage) == (0, 0, ())
  assert meta.config.model == dataclasses.replace(released.MODEL, max_length=32)
  assert tokenizers.from_json(meta.tokenizer).size == 64, 'another tokenizer'
  written = saved_config.read(run / 'config.json', 'nothing')
  assert written == meta.config, 'config.json is not the config of the checkpoint'


def test_training_starts_as_from_scratch_but_for_the_parameters(restored):
  """The checkpoint holds the parameters alone; all the rest that is read is that of step 0."""
  state, meta = restored
  assert all(path.startswith('params/') for path in meta.checksums), 'zeros were stored'
  definition = define_lm(meta.config.model)
  tx = make_optimizer(meta.config.optim, meta.config.train.steps, definition.info)
  # Parameters that are not asked for are not drawn.
  scratch = jax.jit(lambda: {**step_lib.initial_state(definition, tx, 0), 'params': None})()
  same = functools.partial(np.testing.assert_array_equal, strict=True)
  jax.tree.map(same, jax.device_get({**state, 'params': None}), jax.device_get(scratch))
  mesh = sharding.make_mesh(MeshConfig())
  place = jax.tree.map(lambda a: a.sharding, {n: state[n] for n in ('params', 'opt_state')})
  planned = step_lib.state_shardings(mesh, definition, tx)
  assert place == {n: planned[n] for n in place}, 'fresh moments do not lie where they belong'


def test_weights_go_back_bit_for_bit(run, tmp_path):
  export.to_torch(str(run), tmp_path / 'back')
  weights = _read(tmp_path / 'back')
  assert list(weights) == list(released.WEIGHTS), 'names, or their order'
  assert _names(weights) == _names(released.WEIGHTS), 'other bits'


def test_the_tokenizer_goes_with_the_weights(run, tmp_path):
  export.to_torch(str(run), tmp_path / 'back')
  to_jax(tmp_path / 'back', tmp_path / 'again', **released.OPTIONS)
  of_run = {'tokenizer': f'{run}@0', **released.OPTIONS}
  to_jax(released.write(tmp_path / 'model.safetensors'), tmp_path / 'same', **of_run)
  wanted, *got = (_meta(d) for d in (run, tmp_path / 'again', tmp_path / 'same'))
  assert [meta.tokenizer for meta in got] == 2 * [wanted.tokenizer], 'another tokenizer'
  assert got[1].config.data.tokenizer == wanted.config.data.tokenizer


@pytest.mark.parametrize(('dtype', 'suffix'), [('float16', '.bin'), ('bfloat16', '.safetensors')])
def test_half_precision_goes_in_and_comes_back(tmp_path, dtype, suffix):
  released.write_tokenizer(tmp_path)
  source = released.write(tmp_path / f'model{suffix}', dtype=dtype)
  to_jax(source, tmp_path / 'run', **released.OPTIONS)
  got = run_tensors.read_array(checkpoint.open_source(tmp_path / 'run', None), ('embedding',))
  want = released.WEIGHTS['sequential.0.word_embeddings.weight'].astype(tensor_files.DTYPES[dtype])
  np.testing.assert_array_equal(got, want.astype(np.float32))
  export.to_torch(str(tmp_path / 'run'), tmp_path / 'back', dtype=dtype)
  assert _names(_read(tmp_path / 'back')) == _names(_read(source)), 'other bits'


@pytest.mark.parametrize('variant', ['150m', '450m', '900m', '1_5b'])
def test_released_sizes_by_shape(variant):
  """Nothing is allocated: the tensors of the released models, of their names and shapes alone."""
  file = tiny_run.ROOT / 'configs/lm_pile.py'
  planned = config.resolve(runpy.run_path(str(file))['get_config'](variant)).model
  shapes = {name: place.shape for name, place in released_torch.layout(planned).items()}
  got = released_torch.infer_model(shapes)
  references = {name: one.reference for name, one in config.pattentions(got).items()}
  assert references == config.token_counts(planned), 'another scale'
  assert got == config.with_references(planned)
  assert len(shapes) == 3 + 10 * planned.depth, 'the released files have 3 + 10 L tensors'
  assert sum(int(np.prod(shape)) for shape in shapes.values()) == define_lm(planned).count


def _without(name):
  return {n: a for n, a in released.WEIGHTS.items() if n != name}


def _reshaped(name, *shape):
  return {**released.WEIGHTS, name: np.zeros(shape, np.float32)}


MISTAKES = {
  'missing': (_without('sequential.3.mlp.key_param_tokens'), r'sequential\.3\.mlp\.key_.* missing'),
  'first layer': (_without(QUERY), f'{QUERY} is missing'),
  'extra': (
    {**released.WEIGHTS, 'lm_head.weight': np.zeros((64, 32))},
    'lm_head.weight is none',
  ),
  'misshapen': (_reshaped(QUERY, 32, 31), rf'{QUERY} has the shape \[32, 31\];.*\[32, 32\]'),
  'one axis': (_reshaped(QUERY, 32), f'{QUERY} has the shape .*; it must have two axes'),
  'a Transformer': ({'transformer.wte.weight': np.zeros((64, 32))}, 'it has transformer.wte'),
  'nothing': ({}, 'it has none at all'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_wrong_tensors_are_named_and_nothing_is_left(tmp_path, mistake):
  weights, match = MISTAKES[mistake]
  source = released.write(tmp_path / 'model.safetensors', weights)
  released.write_tokenizer(tmp_path)
  before = sorted(os.listdir(tmp_path))
  with pytest.raises(UserError, match=match) as error:
    to_jax(source, tmp_path / 'run', **released.OPTIONS)
  assert len(str(error.value)) < 300, 'a list of tensors is no sentence'
  assert sorted(os.listdir(tmp_path)) == before, 'something was left'


@pytest.mark.parametrize(
  ('options', 'match'),
  [
    ({'heads': None}, r'no released model is 32 wide.*heads=N'),
    ({'heads': 5}, 'is not a multiple of 5 heads'),
    ({'rotary_fraction': float('nan')}, 'rotary_fraction=nan of heads'),
    ({'rotary_fraction': 0.1}, 'and rotate at least two entries'),
    ({'tokenizer': __file__}, 'tokenizer=.* is not a tokenizer.json that'),
    ({'tokenizer': 'bytes'}, 'the tokenizer bytes has 256 token ids, and the embedding 64 rows'),
    ({'tokenizer': ''}, r'there is no .*tokenizer\.json; put it there .*GPT-NeoX-20B'),
    ({'tokenizer': 'nothing.json'}, r'tokenizer=nothing.json is not a file'),
    ({'target': ''}, 'exists; name a new directory'),
  ],
)
def test_wrong_options_get_a_sentence(tmp_path, options, match):
  source = released.write(tmp_path / 'model.safetensors')
  (tmp_path / 'elsewhere').mkdir()
  target = tmp_path / options.pop('target', 'run')
  known = {'tokenizer': str(released.write_tokenizer(tmp_path / 'elsewhere')), **released.OPTIONS}
  with pytest.raises(UserError, match=match):
    to_jax(source, target, **{**known, **options})
  assert sorted(os.listdir(tmp_path)) == ['elsewhere', 'model.safetensors'], 'something was left'


NONFINITE = {
  **released.WEIGHTS,
  QUERY: np.where(np.arange(32) == 7, np.nan, released.WEIGHTS[QUERY]).astype(np.float32),
  'sequential.5.norm.bias': np.full(32, -np.inf, np.float32),
}
TOLD = f'has 64 weights that are NaN or infinite, the first of them in the tensor {QUERY}'


def test_weights_that_are_not_finite_are_refused_unless_a_flag_takes_them(tmp_path, capsys):
  """A model with one NaN computes nothing but NaN, which shows only when it is used."""
  released.write_tokenizer(tmp_path)
  source = released.write(tmp_path / 'model.safetensors', NONFINITE)
  before = sorted(os.listdir(tmp_path))
  with pytest.raises(UserError, match=f'{TOLD}.*allow_nonfinite'):
    to_jax(source, tmp_path / 'run', **released.OPTIONS)
  assert sorted(os.listdir(tmp_path)) == before, 'something was left'
  to_jax(source, tmp_path / 'run', allow_nonfinite=True, **released.OPTIONS)
  assert TOLD in capsys.readouterr().err, 'they were taken without a word'
  before = sorted(os.listdir(tmp_path))
  with pytest.raises(UserError, match=f'{tmp_path}/run .*has 64 weights that are NaN'):
    export.to_torch(str(tmp_path / 'run'), tmp_path / 'back')
  assert sorted(os.listdir(tmp_path)) == before, 'something was left'
  export.to_torch(str(tmp_path / 'run'), tmp_path / 'back', allow_nonfinite=True)
  assert 'has 64 weights that are NaN or infinite' in capsys.readouterr().err
  assert _names(_read(tmp_path / 'back')) == _names(NONFINITE), 'other bits'


def test_the_score_of_the_weights_is_named_by_a_flag(tmp_path, capsys):
  released.write_tokenizer(tmp_path)
  source = released.write(tmp_path / 'model.safetensors')
  asked = [f'--source={source}', f'--target={tmp_path}/run', '--heads=2', '--rotary_fraction=0.5']
  _convert('to-jax', *asked, '--score=softmax')
  said = capsys.readouterr().err
  assert 'assumed' not in said, said
  model = _meta(tmp_path / 'run').config.model
  assert {one.score.kind for one in config.pattentions(model).values()} == {'softmax'}
  _convert('to-torch', f'--source={tmp_path}/run', f'--target={tmp_path}/back')
  said = capsys.readouterr().err
  assert 'set norm_activation_type to it in the config of the released code' in said, (
    f'whoever takes the file trusts another score: {said}'
  )


def test_released_weights_are_one_group_and_several_groups_do_not_go_back():
  shapes = {name: array.shape for name, array in released.WEIGHTS.items()}
  model = released_torch.infer_model(shapes, heads=2, rotary_fraction=0.5)
  assert {len(groups) for groups in named_groups(model).values()} == {1}
  counts = {name: 2 * count for name, count in config.token_counts(model).items()}
  grown = grown_model(config.with_references(model), counts, config.growth(method='group'))
  with pytest.raises(UserError, match='qkv has 2 groups of parameter tokens with a norm each, and'):
    released_torch.check_can_compute(grown)
  released_torch.check_can_compute(choose(grown, first(1)))


def test_assumptions_are_printed(tmp_path, capsys):
  released.write_tokenizer(tmp_path)
  source = released.write(tmp_path / 'model.safetensors')
  _convert('to-jax', f'--source={source}', f'--target={tmp_path}/run', '--heads=2')
  said = capsys.readouterr().err
  assert 'because weights do not record it: --score=l2_norm_gelu, --rotary_fraction=0.25' in said, (
    said
  )


def _convert(*arguments):
  """The command with these arguments, within this process."""
  known, argv = set(flags.FLAGS), ['convert', *map(str, arguments)]
  convert.define_flags(argv)
  flags.FLAGS.set_gnu_getopt()  # Flags may follow the action, whatever ran in this process before.
  try:
    convert.main(signatures.parse(argv))
  finally:
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'score': 'gelu_l1_norm'}, r"qkv\.score\.kind is .*'gelu_l2_norm', 'softmax' only"),
    ({'gelu': 'tanh'}, r"qkv\.score\.gelu is 'tanh'; .* 'exact' only"),
    ({'dense': True}, r"mixer\.qkv\.kind is 'dense'; .* 'pattention' only"),
    ({'rotary': 0}, r"mixer\.positions\.kind is 'none'; .* 'rotary' only"),
    ({'window': 8}, r'mixer\.window is 8; .* 0 only'),
  ],
)
def test_a_model_that_the_released_code_cannot_compute_is_refused(changes, match):
  with pytest.raises(UserError, match=match):
    released_torch.check_can_compute(tiny_model(**changes))


def test_a_model_of_several_kinds_of_layers_is_refused():
  with pytest.raises(UserError, match=r'model\.pattern is .* several kinds of layers has no place'):
    released_torch.check_can_compute(two_kinds())


def test_a_target_that_exists_or_is_named_like_a_file_is_refused(run, tmp_path):
  with pytest.raises(UserError, match=r'model.safetensors is named like a file'):
    export.to_torch(str(run), tmp_path / 'model.safetensors')
  with pytest.raises(UserError, match='exists'):
    export.to_torch(str(run), tmp_path)


@pytest.mark.slow
def test_a_converted_model_trains_grows_and_converts_back(tmp_path, capsys, one_device):
  """The model is one of bytes, so that there is a tokenizer."""
  rng = np.random.default_rng(0)
  shapes = released_torch.layout(tiny_model(layers=1, vocab_size=256))
  weights = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in shapes.items()}
  released.write(tmp_path / 'model.safetensors', weights)
  asked = ['--heads=4', '--rotary_fraction=0.5']
  source, target = f'--source={tmp_path}/model.safetensors', f'--target={tmp_path}/run'
  _convert('to-jax', source, target, *asked, '--tokenizer=bytes', '--sequence_length=32')
  assert capsys.readouterr().out.startswith('tokenformer generate --source=')
  run = tokenformer_jax.load(tmp_path / 'run')
  corpus = tiny_run.write_corpus(tmp_path / 'corpus')
  trained = run.train(
    2,
    data={'source': corpus, 'cache_dir': str(tmp_path / 'cache'), 'batch_size': 2},
    train={'sample_tokens': 0, 'eval_every': 0},
  )
  trained.grow(tmp_path / 'grown', {'ffn': 96}, method='zero_keys')
  _convert('to-torch', f'--source={tmp_path}/grown', f'--target={tmp_path}/back')
  said = capsys.readouterr().err
  assert 'takes the scale from the number of tokens' in said, 'a silent change of function'
  got = tensor_files.find(tmp_path / 'back')
  assert got['sequential.2.mlp.key_param_tokens'].shape == (96, 32), 'not the larger counts'
  again = [f'--source={tmp_path}/back', f'--target={tmp_path}/again', *asked]
  _convert('to-jax', *again)  # The tokenizer is one of bytes.


@pytest.mark.slow
def test_weights_are_in_memory_tensor_by_tensor(tmp_path):
  """Neither way has the model as a whole; tracemalloc counts NumPy's arrays."""
  model = tiny_model(width=192, tokens={'qkv': 192, 'proj': 192, 'ffn': 192}, vocab_size=256)
  model = dataclasses.replace(model, pattern='layer*16')
  shapes = {name: entry.shape for name, entry in released_torch.layout(model).items()}
  rng = np.random.default_rng(0)
  random = ((n, rng.standard_normal(s, dtype=np.float32)) for n, s in shapes.items())
  tensor_files.write(tmp_path, 'float32', shapes, random)

  def peak(convert, *arguments, **options):
    tracemalloc.start()
    convert(*arguments, **options)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return used / (4 * define_lm(model).count)

  options = {'tokenizer': 'bytes', 'heads': 4}
  into = peak(to_jax, tmp_path / 'model.safetensors', tmp_path / 'run', **options)
  back = peak(export.to_torch, str(tmp_path / 'run'), tmp_path / 'back')
  print(f'into {into:.2f}, back {back:.2f} times the model')
  assert max(into, back) < 0.5, (into, back)
