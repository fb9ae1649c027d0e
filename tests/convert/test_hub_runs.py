"""Uses of a run that came from a folder of the hub: text, figures, growth, training, teaching."""

import dataclasses
import json
import re
import shutil

import hub_folders
import numpy as np
import outcomes
import pytest
import tiny_run
import tokenizers as hf

import tokenformer_jax
from tokenformer_jax.config import PattentionConfig, RotaryConfig
from tokenformer_jax.config.pattention import LinearScore
from tokenformer_jax.convert import export
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import shards

pytestmark = pytest.mark.slow
TEXTS = ['SOME WORDS', 'AND OTHERS']
IDS = np.random.default_rng(0).integers(0, 64, (2, 12))


@pytest.fixture(scope='module')
def root(tmp_path_factory, one_device_in_module):
  root = tmp_path_factory.mktemp('brought')
  source = hub_folders.write(root / 'llama')
  to_jax(source, root / 'run')
  (root / 'text').mkdir()
  rng = np.random.default_rng(0)
  for i in range(30):
    (root / 'text' / f'{i}.txt').write_text(''.join(map(chr, rng.integers(33, 90, 300))))
  return root


@pytest.fixture(scope='module')
def run(root):
  return tokenformer_jax.load(root / 'run')


@pytest.fixture(scope='module')
def training(root):
  """Changes of a short training."""
  wanted = ('data.batch_size', 'data.validation_fraction', 'optim.warmup_steps')
  changes = {'optim': {}, 'train': {}, 'data': {}}
  for name, value in tiny_run.CHANGES.items():
    section, key = name.split('.', 1)
    if name in wanted or section == 'train':
      changes[section][key] = value
  changes['data'] |= {'source': f'files:{root}/text/*.txt', 'cache_dir': str(root / 'cache')}
  return changes


def test_a_run_from_python_is_that_of_convert(root, run, tmp_path):
  brought = tokenformer_jax.bring(root / 'llama', tmp_path / 'run', sequence_length=16)
  assert brought.config.data.sequence_length == 16
  outcomes.assert_same(brought.parameters, run.parameters, 'another model than by convert')


def test_text_and_figures(run):
  assert len(run.generate(['ABC', 'LONGER'], length=4, temperature=0.0)) == 2
  assert np.isfinite(list(run.evaluate(TEXTS).values())).all()


def test_a_run_is_trained_on_documents_as_it_is_asked(root, training, tmp_path):
  """They begin with the first token of the folder, in the store and in the figures of both."""
  folder = shutil.copytree(root / 'llama', tmp_path / 'llama')
  tokenizer = hf.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  (token,) = tokenizer.decode([5])
  tokenizer.post_processor = hf.processors.TemplateProcessing(
    single=f'{token} $A', special_tokens=[(token, 5)]
  )
  tokenizer.save(str(folder / 'tokenizer.json'))
  run = tokenformer_jax.bring(folder, tmp_path / 'run', sequence_length=32)
  texts = [letter * 30 for letter in 'ABCD'] + ['E' * 31]  # 160 tokens to predict, five windows
  (tmp_path / 'held.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
  data = training['data'] | {'cache_dir': str(tmp_path / 'cache')}
  data |= {'validation_source': f'files:{tmp_path}/held.jsonl'}
  trained = run.train(2, workdir=tmp_path / 'trained', **{**training, 'data': data})
  assert trained.tokenizer.begin == run.tokenizer.begin == (5,), 'the training forgets it'
  assert trained.meta.tokenizer['files'] == run.meta.tokenizer['files'], 'it forgets the folder'
  (store,) = map(shards.open_store, (tmp_path / 'cache' / 'stores').glob('*-[0-9a-f]*[0-9a-f]'))
  tokens = store.train[:]
  begins = np.flatnonzero(tokens == store.tokenizer.end_of_document)[:-1] + 1
  assert tokens[0] == 5 and (tokens[begins] == 5).all(), 'a document has no beginning'
  logged = outcomes.losses(trained.directory, 'eval/loss')[2]
  assert trained.evaluate(texts)['loss'] == pytest.approx(logged, abs=1e-4)


def test_a_llama_with_more_layers_and_neurons_goes_out_as_a_llama(run, tmp_path):
  torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
  grown = run.grow(tmp_path / 'grown', layers=3, ffn_width=48, method='neurons')
  grown.to_hf(tmp_path / 'folder')
  assert not [*(tmp_path / 'folder').glob('*.py')], 'it needs code of ours'
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'folder')
  assert type(theirs) is transformers.LlamaForCausalLM
  assert (theirs.config.num_hidden_layers, theirs.config.intermediate_size) == (3, 48)
  with torch.no_grad():
    got = theirs(torch.tensor(IDS)).logits.numpy()
  np.testing.assert_allclose(got, run.logits(IDS), atol=1e-5)


WAYS = {
  'as it came': ({}, r'as a LlamaForCausalLM, which transformers and vLLM load'),
  'neurons': ({'width': 48}, r'as a LlamaForCausalLM, which'),
  'tokens': (
    {'beside': PattentionConfig(8)},
    r'PyTorch files of ours, .* it is a LlamaForCausalLM$',
  ),
  'LoRA': (
    {'each': PattentionConfig(8, 8, LinearScore())},
    r'without its parameter tokens it is a LlamaForCausalLM, and they go out as LoRA for it',
  ),
  'other': ({'activation': 'relu', 'gated': False}, r'trust_remote_code=True in transformers$'),
}


@pytest.mark.parametrize('name', WAYS)
def test_the_way_out_is_said(name):
  changes, sentence = WAYS[name]
  model = hub_folders.model('llama')
  ffn = dataclasses.replace(model.layer.ffn, **changes)
  model = dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))
  assert re.search(sentence, export.way_out(model))
  scaled = dataclasses.replace(model.layer.mixer, positions=RotaryConfig(clip=4))
  odd = dataclasses.replace(model, layer=dataclasses.replace(model.layer, mixer=scaled))
  assert 'can be used in JAX only' in export.way_out(odd)


def test_a_grown_run_computes_the_same_and_learns_from_a_wider_one(run, training, tmp_path):
  deeper = run.grow(tmp_path / 'deeper', {'qkv': 8, 'ffn': 16}, layers=3)
  teacher = run.grow(tmp_path / 'teacher', width=32, method='hypercloning')
  np.testing.assert_allclose(deeper.logits(IDS), run.logits(IDS), atol=1e-5)
  distill = {'teacher': str(teacher.directory)}
  trained = deeper.train(2, workdir=tmp_path / 'trained', distill=distill, **training)
  assert np.isfinite(outcomes.losses(trained.directory, 'train/distill_loss')[2])
  embeddings = [one.parameters['embedding'] for one in (deeper, trained)]
  assert not np.array_equal(*embeddings), 'nothing was learned'
  assert trained.meta.family == 'llama', 'the run does not know what it came as'
