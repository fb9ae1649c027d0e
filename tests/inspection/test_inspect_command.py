"""The command, from a work directory to tables, a picture and JSON; and what it refuses."""

import contextlib
import dataclasses
import inspect
import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_run
import typed
import written_runs
from PIL import Image
from tiny import normal_params

from tokenformer_jax.cli import inspect as command
from tokenformer_jax.config import GrowConfig
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.data import held_out, store
from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection.model import load, maps, measure, old_tokens
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.checkpoint_meta import Ancestor

KINDS = ['query', 'key', 'value', 'proj', 'ffn']


pytestmark = pytest.mark.usefixtures('one_device_in_module')


@pytest.fixture(scope='module')
def home(one_device_in_module, tmp_path_factory):
  """The runs `run` of 32, 32 and 64 tokens, `grown` to 48, 32 and 96, and `dense`."""
  root = tmp_path_factory.mktemp('inspect')
  text = tiny_run.write_corpus(root / 'corpus')
  config = complete(tiny_run.config(text, root / 'cache'))
  store.prepare(config.data)
  model = config.model
  params = normal_params(define_lm(model), 0.2)
  written_runs.write_params(root / 'run', config, params, 7)
  larger = grown_model(model, {'qkv': 48, 'proj': 32, 'ffn': 96}, GrowConfig())
  grown = jax.tree.map(_with_zeros, params, define_lm(larger).abstract)
  lineage = (Ancestor('grow', str(root / 'run'), 7, model, GrowConfig(), 7),)
  grown_config = dataclasses.replace(config, model=larger)
  written_runs.write_params(root / 'grown', grown_config, grown, 7, lineage=lineage)
  dense = complete(tiny_run.config(text, root / 'cache', **tiny_run.DENSE))
  of_dense = normal_params(define_lm(dense.model), 0.2)
  written_runs.write_params(root / 'dense', dense, of_dense, 7)
  return root


def _with_zeros(array, like):
  more = [(0, large - small) for small, large in zip(array.shape, like.shape, strict=True)]
  return jax.numpy.asarray(np.pad(array, more))


def _inspect(*arguments: object) -> None:
  """The command with these arguments, within this process."""
  typed.run(command.main, *arguments)


@pytest.fixture(scope='module')
def seen(home):
  """What the command printed of the grown run, and its JSON."""
  options = ['--text=def grow(x)', '--corpus_tokens=500', '--top_k=2', f'--json={home}/all.json']
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    _inspect(f'--source={home}/grown', *options)
  return printed.getvalue(), json.loads((home / 'all.json').read_text())


def test_everything_is_in_the_json(home, seen):
  content = seen[1]
  assert content['source'] == f'{home}/grown' and content['step'] == 7
  assert content['text']['labels'] == ['⟨end⟩', *'def·grow(x)']
  assert content['usage']['positions'] == 500
  assert content['usage']['text'] == 'held-out text of the run'
  both = [(layer, kind) for layer in range(2) for kind in KINDS]
  assert [(r['layer'], r['kind']) for r in content['usage']['layers']] == both
  assert [(r['layer'], r['kind']) for r in content['tokens']] == both
  assert [len(r['contribution']) for r in content['tokens']] == 2 * [48, 48, 48, 32, 96]
  assert len(content['strongest']) == 2 * 5 * 2 and content['definitions']
  growth = content['growth']
  assert (growth['action'], growth['source'], growth['step']) == ('grow', f'{home}/run', 7)
  grew = [(r['kind'], r['old'], r['new']) for r in growth['layers'] if r['layer'] == 0]
  assert grew == [('query', 32, 16), ('key', 32, 16), ('value', 32, 16), ('ffn', 64, 32)]
  assert all(r['new_share_of_contribution'] == 0 for r in growth['layers'])


def test_the_tables_say_what_they_are_about(home, seen):
  printed = seen[0]
  assert '12 tokens of the text given' in printed
  assert 'usage on 500 tokens of held-out text of the run' in printed
  assert f'old and new tokens: grow at step 7 of {home}/run' in printed


def test_the_library_sees_what_the_command_does(home, seen):
  model = load(f'{home}/grown@7')
  ids = np.asarray(seen[1]['text']['ids'])
  top = next(r for r in seen[1]['strongest'] if (r['layer'], r['kind']) == (1, 'ffn'))
  map_TxN = maps(model, ids, [1])[1]['ffn']
  assert map_TxN.shape == (12, 96) and np.argmax(np.abs(map_TxN).max(axis=0)) == top['token']
  of_layer = {'query': 32, 'key': 32, 'value': 32, 'proj': 32, 'ffn': 64}
  assert old_tokens(model) == {0: of_layer, 1: of_layer}
  corpus, _ = held_out.held_out_tokens(model.meta.config.data, model.tokenizer, 500)
  used = measure(model, corpus)[1]['ffn'].mean
  np.testing.assert_allclose(used, seen[1]['tokens'][-1]['mean'], rtol=1e-4)


def test_text_of_files_is_drawn_and_measured(home):
  (home / 'own.txt').write_text('a token')
  _inspect(
    f'--source={home}/grown',
    f'--text=files:{home}/own.txt',
    '--length=4',
    '--layer=1',
    f'--out={home}/heat.png',
    f'--json={home}/own.json',
  )
  image = np.asarray(Image.open(home / 'heat.png').convert('L'))
  assert min(image.shape) > 200 and np.std(image) > 10, 'the picture is blank'
  content = json.loads((home / 'own.json').read_text())
  assert content['text']['labels'] == ['⟨end⟩', 'a', '·', 't']
  assert content['usage']['positions'] == 8, 'the file and the end of its document'
  assert [row['kind'] for row in content['usage']['layers']] == list(KINDS)


def test_a_transformer_shows_the_hidden_units_of_its_mlps(home, tmp_path, capsys):
  _inspect(f'--source={home}/dense', '--corpus_tokens=200', f'--json={tmp_path}/a.json')
  content = json.loads((tmp_path / 'a.json').read_text())
  assert {row['kind'] for row in content['usage']['layers']} == {'ffn'}
  printed = capsys.readouterr().out
  assert 'hidden units count as parameter tokens' in printed
  assert content['growth'] is None and 'old and new' not in printed


@pytest.mark.parametrize(
  ('options', 'sentence'),
  [
    (['--source={home}/corpus'], r'corpus is not the work directory of a run'),
    (['--source={home}/run@3'], r'has no checkpoint of step 3; it has the steps 7'),
    (['--source={home}/run', '--layer=2'], r'--layer is 2; this model has the layers 0 to 1'),
    (['--source={home}/run', '--out=a.jpg'], r'--out=a.jpg must end in \.png, \.pdf or'),
    (['--source={home}/run', '--text=files:none*'], r'--text is files:none\*, which matches no'),
    (['--source={home}/run', '--text=files:{home}/empty.txt'], r'there is no text in files:'),
    (
      ['--source=x', '--json={home}/none/a.json'],
      r'--json=.* written: there is no folder .*none',
    ),
  ],
)
def test_mistakes_are_refused_in_a_sentence(home, options, sentence):
  (home / 'empty.txt').touch()
  with pytest.raises(UserError, match=sentence):
    _inspect(*[option.format(home=home) for option in options])


def test_the_command_does_not_hide_pythons_own_inspect():
  """The folder of a file that is run by its path comes first in the search for modules."""
  code = 'import sys; sys.path.insert(0, sys.argv[1]); import inspect; print(inspect.__file__)'
  folder = str(tiny_run.ROOT / 'tokenformer_jax')
  done = subprocess.run([sys.executable, '-c', code, folder], capture_output=True, text=True)
  assert done.stdout.strip() == inspect.__file__, 'give that folder no __init__.py'
