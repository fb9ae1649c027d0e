"""Apache Beam's workers write the store that the processes of one machine write."""

import dataclasses
import importlib.util

import numbered
import pytest
from byte_text import byte_config, total

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import beam, corpus, store
from tokenformer_jax.errors import UserError

needs_beam = pytest.mark.skipif(
  importlib.util.find_spec('apache_beam') is None,
  reason='Apache Beam is not installed; it needs an environment of its own (docs/data.md)',
)
_DIRECT = '--runner=DirectRunner'
_FLAGS = {
  'direct': _DIRECT,
  'processes': f'{_DIRECT} --direct_running_mode=multi_processing --direct_num_workers=2',
  # Flink and Spark are reached in this way, through a server of jobs.
  'server': '--runner=PortableRunner --job_endpoint=embed --environment_type=LOOPBACK',
}


def _config(folder) -> DataConfig:
  return byte_config(folder, numbered.write(folder / 'a.jsonl', 200))


def _files(made: store.Store) -> dict[str, bytes]:
  files = (path for path in made.path.rglob('*') if path.is_file())
  return {path.relative_to(made.path).as_posix(): path.read_bytes() for path in files}


def test_without_beam_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'--beam needs Apache Beam; install the extra \[beam\]'):
    beam.read_options(_DIRECT)


@needs_beam
@pytest.mark.slow
@pytest.mark.parametrize('runner', _FLAGS)
def test_beam_writes_the_same_bytes(tmp_path, monkeypatch, runner):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 2000)
  config = _config(tmp_path)
  alone = _files(store.make(config))
  named = dataclasses.replace(config, store=str(tmp_path / 'beam'))
  assert _files(store.make(named, beam=_FLAGS[runner])) == alone and len(alone) > 7


@needs_beam
@pytest.mark.slow
def test_a_bad_document_is_named_and_the_build_continues(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 2000)
  config = _config(tmp_path)
  good = (tmp_path / 'a.jsonl').read_text()
  (tmp_path / 'a.jsonl').write_text(f'{good}\nno JSON')
  config = dataclasses.replace(config, store=str(tmp_path / 'beam'))
  with pytest.raises(UserError, match=r'a\.jsonl, the line at byte [\d,]+, is not valid JSON'):
    store.make(config, beam=_DIRECT)
  made = store.make(config, beam=_DIRECT, skip_bad=True)
  assert total(made, 'documents') == 200


@needs_beam
def test_flags_of_clusters_are_understood_and_mistakes_are_named():
  for flags in (
    '--runner=DataflowRunner --project=P --region=R --temp_location=gs://bucket/temporary '
    '--sdk_container_image=IMAGE --max_num_workers=64 --number_of_worker_harness_threads=1',
    '--runner=FlinkRunner --flink_master=HOST:8081 --environment_type=DOCKER '
    '--environment_config=IMAGE --parallelism=64',
    '--runner=SparkRunner --spark_master_url=spark://HOST:7077 --environment_type=DOCKER '
    '--environment_config=IMAGE',
  ):
    options = beam.read_options(flags).get_all_options(drop_default=True)
    assert len(options) == len(flags.split()), 'a flag of docs/data.md is lost'
  with pytest.raises(UserError, match='Unexpected pipeline runner: Flinck'):
    beam.read_options('--runner=Flinck')
