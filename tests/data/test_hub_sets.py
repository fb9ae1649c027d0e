"""Sets of the hub by their names: the real libraries against a stand-in for the hub."""

import io

import datasets
import hub_server
import huggingface_hub
import pytest
from huggingface_hub import constants

from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import TransientError, UserError

TEXTS = [f'document {i}' for i in range(50)]


def _parquet(texts) -> bytes:
  file = io.BytesIO()
  datasets.Dataset.from_dict({'text': texts}).to_parquet(file)
  return file.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A hub with a set of two splits, and empty caches."""
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  with hub_server.serving() as server:
    hub_server.use(monkeypatch, server.url, tmp_path / 'cache')
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', server.url)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'cache/datasets'))
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', False)
    names = ('data/train-00000-of-00001.parquet', 'data/test-00000-of-00001.parquet')
    files = {names[0]: _parquet(TEXTS), names[1]: _parquet(['test'])}
    files |= {'README.md': b'---\nlicense: mit\n---\n# A set\n'}
    server.repositories['datasets/org/texts'] = hub_server.Repository(files)
    yield server
  huggingface_hub.close_session()


def _read(name) -> list[str]:
  return list(open_source(f'hf:{name}', 'text').documents())


def test_a_set_is_fetched_once_and_read_without_a_network(hub, monkeypatch):
  assert _read('org/texts') == TEXTS and _read('org/texts:test') == ['test']
  assert len(hub.fetched()) == len(set(hub.fetched())), 'a file is fetched again'
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
  assert _read('org/texts') == TEXTS
  with pytest.raises(UserError, match=r'not in the cache, and HF_HUB_OFFLINE forbids the network'):
    _read('org/other')


def test_a_set_that_is_not_there_or_gated(hub):
  with pytest.raises(
    UserError, match=r"hf:org/none, which .* doesn't exist on the Hub or cannot be"
  ):
    _read('org/none')
  hub.repositories['datasets/org/texts'].gated = True
  with pytest.raises(
    UserError, match=r'is a gated dataset on the Hub\. Visit .* to ask for access'
  ):
    _read('org/texts')


def _hang_up(monkeypatch):
  """Has the libraries look for the hub where nobody answers."""
  for place, name in ((constants, 'ENDPOINT'), (datasets.config, 'HF_ENDPOINT')):
    monkeypatch.setattr(place, name, 'http://127.0.0.1:9')


def test_without_a_network_the_cache_is_read(hub, monkeypatch):
  assert _read('org/texts:test') == ['test']
  _hang_up(monkeypatch)
  assert _read('org/texts:test') == ['test']


def test_without_a_network_and_a_cache(hub, monkeypatch):
  _hang_up(monkeypatch)
  with pytest.raises(TransientError, match=r'hub cannot be reached .*run the same command again'):
    _read('org/texts')
