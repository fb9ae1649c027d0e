"""The batch that two models are compared on, and what counts as the same."""

import numpy as np
import pytest
from growing import mesh_of, params_of
from tiny import tiny_model

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, TextConfig
from tokenformer_jax.data import store, tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import verify
from tokenformer_jax.resolve.facts import complete


@pytest.fixture
def config(tmp_path):
  for i in range(20):
    (tmp_path / f'{i}.txt').write_text(f'document {i} ' * 20)
  data = TextConfig(
    source=f'files:{tmp_path}/*.txt',
    tokenizer='bytes',
    sequence_length=16,
    validation_fraction=0.5,
    cache_dir=str(tmp_path / 'cache'),
  )
  return Config(data=data)


def _held_out(config, tokenizer, count, first=0):
  return tasks.make(complete(config)).held_out(tokenizer.to_json(), count, first)


def test_rows_are_of_the_text_that_was_held_out(config):
  text = store.prepare(config.data)
  rows, name = _held_out(config, text.tokenizer, 4)
  assert (rows.shape, rows.dtype, name) == (
    (4, 17),
    np.int32,
    '4 × 16 tokens of held-out text of the run',
  )
  np.testing.assert_array_equal(rows.ravel(), text.validation[: 4 * 17])
  others, _ = _held_out(config, text.tokenizer, 2, first=2)
  np.testing.assert_array_equal(others, rows[2:], err_msg='calibration and check overlap')


def test_a_short_text_is_repeated(config):
  text = store.prepare(config.data)
  many = len(text.validation) // 17 + 5
  rows, _ = _held_out(config, text.tokenizer, many)
  assert rows.shape == (many, 17)


def test_other_text_when_the_runs_is_not_here(config, tmp_path):
  for path in tmp_path.glob('*.txt'):
    path.unlink()
  rows, name = _held_out(config, tokenizers.load('bytes'), 4)
  assert rows.shape == (4, 17) and name == '4 × 16 tokens of text of the Python standard library'


def test_no_store_is_built_to_compare(config, tmp_path):
  _, name = _held_out(config, tokenizers.load('bytes'), 4)
  assert name == '4 × 16 tokens of text of the Python standard library'
  assert not list(tmp_path.rglob('zarr.json')), 'a token store was made for two sequences'


def test_a_difference_is_seen():
  model, mesh = tiny_model(), mesh_of()
  rows = np.random.default_rng(0).integers(0, 64, (2, 9), np.int32)
  params = params_of(model)
  scale = np.where(np.arange(64)[:, None] == 3, np.float32(1.01), np.float32(1))
  other = {**params, 'embedding': np.asarray(params['embedding']) * scale}
  task = verify.exact_task(Config(), model)
  same, changed = map(verify.program(task, rows, mesh), (params, other))
  different, allowed = verify.largest_difference(same, same)
  assert different == 0 < allowed
  different, allowed = verify.largest_difference(same, changed)
  assert different > allowed, 'a changed model passes for the same'
  probabilities = np.asarray(same.logits, np.float64)
  probabilities -= np.log(np.sum(np.exp(probabilities), axis=-1, keepdims=True))
  want = -np.mean(np.take_along_axis(probabilities, rows[:, 1:, None], axis=-1))
  assert abs(same.loss - want) < 1e-5, 'the loss is not the mean cross-entropy'


def test_outputs_that_are_not_finite_are_refused(monkeypatch):
  monkeypatch.setattr(verify, 'program', lambda task, batch, mesh: lambda outputs: outputs)
  model, ones = tiny_model(), np.ones((1, 4, 64), np.float32)
  comparison = verify.Comparison(Config(), (model, model), None, 'ones', mesh_of())
  comparison.see(verify.Outputs(ones, 1.0))
  comparison.see(verify.Outputs(ones * np.float32(np.nan), 1.0))
  with pytest.raises(UserError, match=r'are not finite.*nothing was written'):
    comparison.report(exact=False)
