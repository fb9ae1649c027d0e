"""Work directories and text in a bucket of Google Cloud Storage, played by bucket_server.py."""

import gzip
import importlib.util
import io
import os

import bucket_server
import jax
import pyarrow as pa
import pytest
import tiny_hosts
import tiny_run
from outcomes import assert_same
from pyarrow import parquet
from tiny_run import trainer

from tokenformer_jax.data.sources import open_source
from tokenformer_jax.decoding import trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, curves, metrics
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow
NO_PERMISSION = {'statuses': (403,), 'methods': ('POST', 'PUT'), 'matching': 'b/bucket/'}


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  return tiny_run.write_corpus(tmp_path_factory.mktemp('text') / 'corpus')


@pytest.fixture(scope='module')
def make(source, tmp_path_factory):
  cache = tmp_path_factory.mktemp('cache')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    yield lambda **changes: tiny_run.config(
      source, cache, **{'train__checkpoint_every': 10, **changes}
    )


@pytest.fixture(scope='module')
def run(bucket, make):
  """A run in the bucket, whose last steps were made twice, and its last state."""
  url = 'gs://bucket/runs/one'
  loop.train(make(train__trackers=('tensorboard',)), url)
  for name in objects(bucket, 'runs/one/checkpoints/20/'):
    del bucket.buckets['bucket'][name]
  return url, loop.train(make(train__trackers=('tensorboard',), train__profile_steps='12:13'), url)


def objects(bucket, prefix):
  return [name for name in bucket.buckets['bucket'] if name.startswith(prefix)]


@pytest.fixture
def copy(run, bucket):
  """Another work directory with the same objects, and those."""
  of_bucket = bucket.buckets['bucket']
  for name in objects(bucket, 'runs/copy/'):
    del of_bucket[name]
  for name in objects(bucket, 'runs/one/'):
    of_bucket[name.replace('one', 'copy', 1)] = of_bucket[name]
  return 'gs://bucket/runs/copy', of_bucket


def test_a_run_in_a_bucket_is_that_on_a_disk(run, make, tmp_path):
  url, got = run
  assert_same(got, loop.train(make(), tmp_path), 'going on, or the bucket, changes the run')
  lines, wanted = metrics.read(url), metrics.read(tmp_path)
  assert [line['step'] for line in lines] == [line['step'] for line in wanted]
  assert [line.get('train/loss') for line in lines] == [line.get('train/loss') for line in wanted]


def test_the_files_of_a_run_are_in_the_bucket(run, bucket):
  files = objects(bucket, 'runs/one/')
  assert 'runs/one/config.json' in files
  assert sum('tensorboard/events' in name for name in files) == 2, 'one of each process'
  assert sum(name.endswith('.xplane.pb') for name in files) == 1, 'the profile is not copied'
  assert not [name for name in files if 'probe' in name], 'a trace of trying to write is left'


def test_the_figures_of_a_run_in_a_bucket_are_drawn(run):
  url, _ = run
  found = curves.curves(url, 'tokens', 'train/loss')['train/loss']
  assert found[1] == [one['train/loss'] for one in metrics.read(url) if 'train/loss' in one]
  with pytest.raises(UserError, match=r'is not a run: its metrics.jsonl .*\(it does not exist\)'):
    curves.curves('gs://bucket/runs/none', 'steps', 'train/loss')


def test_a_command_reads_its_source_there(run):
  url, state = run
  assert_same(trained.load(f'{url}@20').params, state['params'], 'other parameters were read')


def test_a_run_starts_from_a_smaller_one_there(run, make, bucket):
  url, state = run
  larger = make(init_from=url, model__layer__ffn__tokens=128, train__steps=20, grow__step='restart')
  grown = trainer(larger, paths.parse_path('gs://bucket/runs/larger')).first_state()[0]
  keys = grown['params']['blocks']['ffn']['keys']
  assert_same(keys[:, :64], state['params']['blocks']['ffn']['keys'], 'what was learned is lost')


def write(target, run):
  url, state = run
  meta = checkpoint.open_source(paths.parse_path(url)).meta
  grow_run.check_target(target)
  grow_run.write(target, Meta(20, meta.config, meta.tokenizer), state)


def test_a_grown_model_is_written_there(run):
  target = paths.parse_path('gs://bucket/runs/grown')
  write(target, run)
  assert_same(trained.load(str(target)).params, run[1]['params'], 'other parameters were written')
  assert (target / 'config.json').exists()
  with pytest.raises(UserError, match='runs/grown exists; name a new directory'):
    grow_run.check_target(target)


def test_a_failed_write_leaves_nothing(run, bucket, monkeypatch):
  target = paths.parse_path('gs://bucket/runs/failed')
  save = checkpoint.Checkpoints.save

  def full(*arguments, **named):
    save(*arguments, **named)
    raise OSError('no room')

  monkeypatch.setattr(checkpoint.Checkpoints, 'save', full)
  with pytest.raises(
    UserError, match=r'could not be written \(OSError: no room\); nothing is left'
  ):
    write(target, run)
  assert not objects(bucket, 'runs/failed'), 'half a model looks like a run'


def test_a_checkpoint_counts_when_its_last_object_is_there(copy):
  url, of_bucket = copy
  del of_bucket['runs/copy/checkpoints/20/commit_success.txt']
  meta = checkpoint.open_source(paths.parse_path(url)).meta
  assert meta.step == 10, 'a checkpoint that was being written is taken for a whole one'


def test_a_checkpoint_survives_calls_that_fail(copy, bucket):
  """gcsfs and TensorStore try again by themselves, after a second."""
  url, of_bucket = copy
  before = dict(of_bucket)
  with bucket.failing(statuses=(503, 429), matching='copy/checkpoints', most=2) as faults:
    meta = checkpoint.open_source(paths.parse_path(url)).meta
  assert len(faults.failed) == 2, 'nothing failed'
  assert meta.step == 20 and of_bucket == before, 'a hiccup condemned a checkpoint'


def test_missing_rights_are_no_damage(copy, bucket):
  url, of_bucket = copy
  before = dict(of_bucket)
  with (
    bucket.failing(statuses=(403,), methods=('GET',), matching='meta/metadata'),
    pytest.raises(UserError, match=r'copy/checkpoints/20 cannot be read \(.*Forbidden'),
  ):
    checkpoint.open_source(paths.parse_path(url), None)
  assert of_bucket == before


def test_calls_fail_by_chance_but_the_same_ones_each_time():
  calls = [('GET', f'/o/{i}') for i in range(200)] + [('POST', '/upload/x')] * 50

  def failed(**how):
    faults = bucket_server.Faults(**how)
    return [i for i, call in enumerate(calls) if faults.status(*call)]

  some = failed(one_in=5, seed=3)
  assert some == failed(one_in=5, seed=3) != failed(one_in=5, seed=4)
  assert 30 < len(some) < 70, 'not one in five'
  assert failed(methods=('POST',), most=2) == [200, 201]
  assert failed(matching=r'/19\d$') == list(range(190, 200))


def test_a_damaged_checkpoint_is_moved_aside(run, bucket, copy, make):
  url, of_bucket = copy
  of_bucket['runs/copy/checkpoints/20/meta/metadata'] = (10**6, b'{}')
  assert_same(loop.train(make(), url), run[1], 'it did not go on from the one before')
  assert objects(bucket, 'runs/copy/damaged/20/meta/'), 'what may be mended is gone'


@pytest.mark.full_size
def test_two_processes_share_a_bucket(bucket, source, tmp_path):
  found = []
  for workdir in ('gs://bucket/runs/two', tmp_path / 'run'):
    command = tiny_run.command(source, tmp_path, workdir, mesh__fsdp=2, mesh__tokens=2)
    tiny_hosts.run(command, 2, devices=2)
    found.append([line.get('train/loss') for line in metrics.read(workdir)])
  assert found[0] == found[1], 'the bucket changes the run'
  assert checkpoint.open_source(paths.parse_path('gs://bucket/runs/two'), None)[1].step == 20


def test_text_is_read_there(bucket, tmp_path):
  contents = {'a.txt': b'one', 'b/c.txt.gz': gzip.compress(b'two'), 'b/d.jsonl': b'{"text": "3"}'}
  for name, content in contents.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    bucket.buckets['bucket'][f'text/{name}'] = (next(bucket.generations), content)
  ours = open_source('files:gs://bucket/text/**', 'text')
  wanted = open_source(f'files:{tmp_path}/**', 'text')
  assert list(ours.documents()) == list(wanted.documents()) == ['one', 'two', '3']
  bucket.buckets['bucket']['text/.hidden/e.txt'] = (next(bucket.generations), b'four')
  folder = open_source('files:gs://bucket/text/', 'text')
  assert list(folder.documents()) == ['one', 'two', '3'], 'a folder in a bucket is not its files'
  before = ours.fingerprint()
  bucket.buckets['bucket']['text/a.txt'] = (next(bucket.generations), b'own')
  changed = open_source('files:gs://bucket/text/**', 'text').fingerprint()
  assert changed != before, 'another text of the same length is taken for the same'
  with pytest.raises(UserError, match='matches no file'):
    open_source('files:gs://bucket/nothing/*', 'text')


@pytest.mark.parametrize('form', ['files', 'parquet'])
def test_a_folder_of_many_files_costs_one_listing(bucket, form):
  for i in range(10_000):
    name = f'many/{i:05}.{"jsonl" if form == "files" else "parquet"}'
    bucket.buckets['bucket'][name] = (next(bucket.generations), b'{"text": "a"}')
  bucket.asked.clear()
  source = open_source(f'{form}:gs://bucket/many/*', 'text')
  source.fingerprint()
  assert len(list(source.divide(2**27))) == 10_000
  assert len(bucket.asked) <= 4, f'10,000 files cost the calls {bucket.asked}'


def test_a_packed_file_is_read_in_few_calls(bucket):
  content = os.urandom(300_000).hex().encode()
  bucket.buckets['bucket']['packed/a.txt.gz'] = (next(bucket.generations), gzip.compress(content))
  source = open_source('files:gs://bucket/packed', 'text')
  bucket.asked.clear()
  assert list(source.documents()) == [content.decode()]
  assert 0 < len(bucket.asked) <= 6, f'a packed file of 300 kB costs the calls {bucket.asked}'


def test_a_parquet_file_is_read_there(bucket):
  texts = [f'{i} ' * 100 for i in range(500)]
  buffer = io.BytesIO()
  parquet.write_table(pa.table({'text': texts}), buffer, row_group_size=100)
  bucket.buckets['bucket']['set/a.parquet'] = (next(bucket.generations), buffer.getvalue())
  source = open_source('parquet:gs://bucket/set', 'text')
  with bucket.failing(methods=('GET',), most=1, matching='alt=media') as faults:
    assert list(source.documents()) == texts
  assert faults.failed, 'the test made nothing fail'


def test_figures_that_cannot_be_copied_are_kept_and_copied_later(bucket, caplog):
  growing = paths.Growing(paths.parse_path('gs://bucket/runs/figures'))
  (growing.directory / 'metrics.jsonl').write_text('1\n')
  with bucket.failing(**NO_PERMISSION):
    assert not growing.publish()
  assert 'are not copied to gs://bucket/runs/figures' in caplog.text
  growing.close()
  assert bucket.buckets['bucket']['runs/figures/metrics.jsonl'][1] == b'1\n'
  assert not growing.directory.exists(), 'the temporary directory is left'


MISTAKES = {
  'no such bucket': ('gs://other/run', r'gs://other/run cannot be written \(it does not exist\)'),
  'no permission': ('gs://bucket/run', 'gs://bucket/run cannot be written .*made to fail'),
  'another store': ('s3://bucket/run', 's3://bucket/run is neither a path in a file system nor gs'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_work_directories_that_cannot_be_written_are_refused(mistake, bucket, make):
  url, said = MISTAKES[mistake]
  with bucket.failing(**NO_PERMISSION), pytest.raises(UserError, match=said):
    loop.train(make(), url)


def test_buckets_need_gcsfs(monkeypatch):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name: None if name == 'gcsfs' else found(name)
  )
  with pytest.raises(UserError, match=r'needs gcsfs; run pip install -e "\.\[gcs\]"'):
    paths.split_source('gs://bucket/run@7')
