"""Models of the hub by their names: the real library against a stand-in for the hub."""

import json
import os
from pathlib import Path

import hub_folders
import hub_server
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

import tokenformer_jax
from tokenformer_jax.convert import hub_download, model_card
from tokenformer_jax.errors import TransientError, UserError

NEEDED = ('config.json', 'tokenizer.json')
INDEX = 'model.safetensors.index.json'
UNUSED = ('pytorch_model.bin', 'consolidated.safetensors', 'onnx/model.onnx', 'README.md')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return hub_folders.write(tmp_path_factory.mktemp('hub') / 'llama')


@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
  """A hub with a model of one file and all that may be beside it, and an empty cache."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  with hub_server.serving() as server:
    hub_server.use(monkeypatch, server.url, tmp_path / 'cache')
    server.repositories['org/llama'] = model = hub_server.Repository.of(folder)
    model.files |= dict.fromkeys(UNUSED, b'not to be fetched')
    yield server
  huggingface_hub.close_session()


def _in_shards(model):
  """Has two files of weights and their index; return their names."""
  one, two = (f'model-0000{i}-of-00002.safetensors' for i in (1, 2))
  index = {'weight_map': {'lm_head.weight': one, 'model.norm.weight': two}}
  model.files |= {one: b'one', two: b'two', INDEX: json.dumps(index).encode()}
  del model.files['model.safetensors']
  return one, two


def test_a_name_brings_the_files_that_are_needed_alone(hub):
  found = hub_download.find('org/llama')
  assert sorted(hub.fetched()) == sorted((*NEEDED, 'model.safetensors'))
  assert found.name == hub.repositories['org/llama'].commit, 'another folder than that of a commit'
  hub.asked.clear()
  assert hub_download.find(f'org/llama@{found.name}') == found
  assert not hub.fetched(), 'a file in the cache is fetched again'


def test_shards_are_those_of_the_index(hub):
  shards = _in_shards(hub.repositories['org/llama'])
  hub_download.find('org/llama')
  wanted = (*NEEDED, *shards, INDEX)
  assert sorted(hub.fetched()) == sorted(wanted)


def test_files_of_pytorch_where_there_are_no_others(hub):
  files = hub.repositories['org/llama'].files
  for name in ('model.safetensors', 'consolidated.safetensors'):
    del files[name]
  hub_download.find('org/llama')
  assert sorted(hub.fetched()) == sorted((*NEEDED, 'pytorch_model.bin'))


def test_a_transfer_that_is_cut_off_goes_on_where_it_ended(hub, folder, monkeypatch):
  monkeypatch.setattr(constants, 'DOWNLOAD_CHUNK_SIZE', 100)  # what is less is asked for again
  model = hub.repositories['org/llama']
  model.cuts['model.safetensors'] = 2
  found = hub_download.find('org/llama')
  whole = (folder / 'model.safetensors').read_bytes()
  assert (found / 'model.safetensors').read_bytes() == whole
  parts = [call for call in hub.asked if call.startswith('GET') and '/model.safetensors' in call]
  begins = [int(call.partition('bytes=')[2].strip('-') or 0) / len(whole) for call in parts]
  np.testing.assert_allclose(begins, [0, 1 / 2, 3 / 4], atol=0.01, err_msg='it begins anew')


def test_a_download_that_failed_keeps_its_whole_files(hub):
  model = hub.repositories['org/llama']
  _, two = _in_shards(model)
  model.cuts[two] = 6  # as often as the library tries
  with pytest.raises(
    TransientError, match=r'could not be fetched .* which keeps the files that are'
  ):
    hub_download.find('org/llama')
  hub.asked.clear()
  hub_download.find('org/llama')
  assert hub.fetched() == [two], 'a whole file is fetched again'


def test_a_folder_of_that_name_wins(hub, folder):
  os.makedirs('org')
  os.symlink(folder, 'org/llama')
  assert hub_download.find('org/llama') == Path('org/llama')
  assert not hub.asked


def test_a_gated_model_comes_with_the_token_of_the_login(hub, tmp_path):
  hub.repositories['org/llama'].gated = True
  with pytest.raises(UserError, match=r'org/llama is gated, .* ask for access at http.*/org/llama'):
    hub_download.find('org/llama')
  (tmp_path / 'cache').mkdir(exist_ok=True)
  (tmp_path / 'cache/token').write_text('let-me-in')
  assert hub_download.find('org/llama').is_dir()


@pytest.mark.parametrize('offline', [False, True])
def test_without_a_network_the_cache_is_taken(hub, monkeypatch, offline, capfd):
  found = hub_download.find('org/llama')
  if offline:
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  else:
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')  # where nobody answers
  assert hub_download.find('org/llama') == found
  assert 'org/llama is taken from the cache' in capfd.readouterr().err
  refused = UserError if offline else TransientError
  sentence = 'HF_HUB_OFFLINE forbids the network' if offline else 'Connect.* run the same command'
  (found / 'model.safetensors').unlink()
  for name in ('org/other', 'org/llama'):
    with pytest.raises(refused, match=f'{name} is no file or folder here.* and .*{sentence}'):
      hub_download.find(name)


def test_a_model_that_cannot_be_converted_is_refused_before_its_weights_come(hub):
  files = hub.repositories['org/llama'].files
  config = json.loads(files['config.json'])
  bloom = {'architectures': ['BloomForCausalLM'], 'model_type': 'bloom'}
  files['config.json'] = json.dumps(config | bloom).encode()
  with pytest.raises(UserError, match="is of a 'bloom', which cannot be converted"):
    hub_download.find('org/llama')
  files['config.json'] = json.dumps(config).encode()
  del files['tokenizer.json']
  with pytest.raises(
    UserError, match=r'there is no .*/tokenizer\.json; put it there or name it by'
  ):
    hub_download.find('org/llama')
  assert 'model.safetensors' not in hub.fetched()
  assert hub_download.find('org/llama', 'bytes').is_dir()


PAGES = {
  'https://huggingface.co/org/llama': 'org/llama',
  'http://www.huggingface.co/org/llama/?library=transformers': 'org/llama',
  'huggingface.co/org/llama/tree/main': 'org/llama@main',
  'https://hf.co/org/llama/blob/v1.0/config.json#L3': 'org/llama@v1.0',
  'https://huggingface.co/org/llama/tree/refs%2Fpr%2F1': 'org/llama@refs/pr/1',
  'https://huggingface.co/org/llama/resolve/main/model.safetensors?download=true': 'org/llama@main',
}


def test_the_address_of_a_page_stands_for_its_model(hub):
  assert {page: hub_download.of_page(page) for page in PAGES} == PAGES
  assert hub_download.find(next(iter(PAGES))) == hub_download.find('org/llama')
  with pytest.raises(UserError, match='is not the page of a model; name a model of the hub as ORG'):
    hub_download.find('https://huggingface.co/datasets/org/texts')
  with pytest.raises(UserError, match='is not a path in a file system'):
    hub_download.find('https://example.com/org/llama')


MISTAKES = {
  'org/none': 'org/none is no file or folder here, and the hub has no model org/none that you may',
  'org/llama@v9': "org/llama has no revision 'v9'; take a branch, a tag or a commit of http",
  'org/na--me': 'org/na--me is no file or folder here, and no name of a model: .*Cannot have --',
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_name_that_brings_nothing_is_one_sentence(hub, name):
  with pytest.raises(UserError, match=MISTAKES[name]):
    tokenformer_jax.bring(name, 'run')


@pytest.mark.parametrize('name', ['llama', './org/llama', 'org/llama/main', 'org/llama.bin'])
def test_what_is_no_name_asks_no_hub(hub, name):
  with pytest.raises(UserError, match=r'is not a file or directory here; name .* ORG/NAME'):
    tokenformer_jax.bring(name, 'run')
  assert not hub.asked


def test_bring(hub):
  run = tokenformer_jax.bring('org/llama@main')
  assert Path(run.source.partition('@')[0]) == Path('runs/llama')
  card, commit = model_card.write(run.meta, 'float32', 'out'), hub.repositories['org/llama'].commit
  assert 'base_model: org/llama\n---' in card and f'| org/llama, commit {commit} |' in card
