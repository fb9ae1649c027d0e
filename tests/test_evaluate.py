"""The command: what it prints and writes, and one sentence for a mistake."""

import dataclasses
import functools
import json
import sys
from typing import Any

import datasets
import pytest
import tiny
import tiny_run
import tiny_trained
import typed
import written_runs
from lm_eval.tasks import TaskManager
from tiny import tiny_model

import tokenformer_jax
from tokenformer_jax import config
from tokenformer_jax.api.run import Run
from tokenformer_jax.cli import evaluate
from tokenformer_jax.decoding import evaluation, harness
from tokenformer_jax.errors import UserError

# Table 1 of the paper from what the harness would say, one task left out in the tests below.
RESULTS = {
  'lambada_openai': {'perplexity': 16.5, 'acc': 0.45},
  'hellaswag': {'acc': 0.3, 'acc_norm': 0.36},
  'piqa': {'acc': 0.65, 'acc_norm': 0.1},
  'arc_easy': {'acc': 0.47, 'acc_norm': 0.2},
  'arc_challenge': {'acc': 0.2, 'acc_norm': 0.25},
  'winogrande': {'acc': 0.51},
}


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> str:
  """A run that has only parameters, and that named the kernel of other devices for attention."""
  whole, target = tiny_trained.config(), tmp_path_factory.mktemp('runs') / 'tiny'
  whole = dataclasses.replace(whole, train=dataclasses.replace(whole.train, attention='cudnn'))
  return str(written_runs.write_params(target, whole, tiny.large_params(whole.model), 7))


@pytest.fixture
def command(source, tmp_path, monkeypatch, capsys, one_device):
  """Run the command; return its two outputs, and its report."""
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'datasets')
  # Without the harness's own tasks, which take seconds to list.
  monkeypatch.setattr(
    harness, 'TaskManager', functools.partial(TaskManager, include_defaults=False)
  )
  # It starts a dozen programs to describe the machine.
  monkeypatch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)
  monkeypatch.chdir(tiny_run.ROOT)
  output = tmp_path / 'report.json'

  def run(*arguments: str) -> tuple[str, str, dict[str, Any]]:
    given = [f'--source={source}', f'--output={output}', *arguments]
    typed.run(evaluate.main, *given, like=Run.evaluate, without=['texts'])
    return *capsys.readouterr(), json.loads(output.read_text())

  return run


def _tasks(results: dict[str, dict[str, float]]) -> dict[str, Any]:
  return {
    task: {'metrics': {k: {'value': v, 'stderr': 0.01} for k, v in metrics.items()}, 'samples': 9}
    for task, metrics in results.items()
  }


RELEASED = {
  'layers': 12,
  'width': 768,
  'heads': 12,
  'tokens': {'qkv': 768, 'proj': 768, 'ffn': 3072},
}


def test_tasks_and_text_in_one_report(command, source, tmp_path):
  (tmp_path / 'a.txt').write_text('Readability counts.')
  printed, _, report = command(
    '--include_path=tests/tasks',
    '--tasks=local_last_word,local_rolling',
    f'--text=files:{tmp_path}/*.txt',
    '--stride=8',
    '--limit=2',
    '--batch_size=8',
  )
  assert (report['source'], report['step'], report['limit']) == (source, 7, 2)
  model = tokenformer_jax.load(source).config.model
  assert report['model'] == json.loads(json.dumps(config.to_json(model)))
  assert set(report['versions']) == {'tokenformer_jax', 'jax', 'lm_eval'}
  assert report['seconds'] > 0
  last_word = report['tasks']['local_last_word']
  assert set(last_word['metrics']) == {'perplexity', 'acc'}
  assert last_word['metrics']['perplexity']['stderr'] > 0
  assert (last_word['samples'], last_word['num_fewshot'], last_word['version']) == (2, 0, 1.0)
  assert report['tasks']['local_rolling']['metrics']['bits_per_byte']['stderr'] is None
  assert (report['text']['bytes'], report['text']['stride']) == (19, 8)
  figure = last_word['metrics']['perplexity']['value']
  assert f'{figure:.4f}' in printed and f'{report["text"]["loss"]:,.4f}' in printed
  assert 'bootstrapping' not in printed, 'the standard output has more than the results'


@pytest.mark.slow
def test_a_length_beyond_training_is_explained(command, tmp_path):
  (tmp_path / 'a.txt').write_text('Readability counts.' * 9)
  text = f'--text=files:{tmp_path}/*.txt'
  _, said, report = command(text, '--max_length=60')
  untrained = (
    'rotary positions beyond the 48 of training are untrained; --clip_positions=W below 48 '
  )
  assert said.startswith(untrained) and report['max_length'] == 60
  _, said, clipped = command(text, '--max_length=60', '--clip_positions=12')
  assert said == '', 'a warning about clipped distances'
  assert clipped['model']['layer']['mixer']['positions']['clip'] == 12, 'the report hides the clip'
  assert clipped['text']['loss'] != report['text']['loss'], 'the clip has no effect'


def test_without_the_harness_the_extra_is_named(command, monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)
  monkeypatch.delitem(sys.modules, 'tokenformer_jax.decoding.harness', raising=False)
  monkeypatch.delattr('tokenformer_jax.decoding.harness', raising=False)
  with pytest.raises(UserError, match=r'install it: pip install -e "\.\[eval\]"'):
    command('--tasks=piqa')


def test_rotary_positions_do_not_bound_the_length():
  assert tiny_trained.trained().context_length(49) == 49


# The table of the paper


def test_columns_are_the_paper_s():
  found = evaluation.table_1(_tasks(RESULTS))
  assert list(found.values()) == pytest.approx([16.5, 45, 36, 65, 47, 25, 51, 269 / 6])


@pytest.mark.parametrize('task', RESULTS)
def test_there_is_no_average_of_some(task):
  found = evaluation.table_1(_tasks({k: v for k, v in RESULTS.items() if k != task}))
  assert 'average' not in found and len(found) == (5 if task == 'lambada_openai' else 6)


def test_the_published_row_is_beside_a_model_of_that_size():
  report = {'source': 'runs/150m', 'step': 0, 'tasks': _tasks(RESULTS)}
  ours, theirs = evaluation.render(report, tiny_model(**RELEASED)).splitlines()[-2:]
  assert ours.startswith('runs/150m, step 0 ')
  assert _numbers(ours)[-8:] == [16.5, 45, 36, 65, 47, 25, 51, 44.83]
  assert theirs.startswith('TokenFormer-150M, as published ')
  assert _numbers(theirs)[-8:] == [16.38, 45, 35.5, 64.9, 47.3, 24.9, 50.4, 44.7]


def _numbers(line: str) -> list[float]:
  return [float(cell) for cell in line.split() if cell.replace('.', '').isdecimal()]


@pytest.mark.parametrize(
  'changes',
  [
    {'tokens': {'qkv': 768, 'proj': 768, 'ffn': 3200}},
    {'layers': 13},
    {'dense': True},
  ],
)
def test_no_row_is_beside_a_model_of_another_size(changes):
  assert evaluation.published(tiny_model(**{**RELEASED, **changes})) is None


@pytest.mark.parametrize('size', evaluation._PUBLISHED)
def test_a_published_average_is_that_of_its_row(size):
  _, (_, *accuracies, average) = evaluation._PUBLISHED[size]
  assert sum(accuracies) / 6 == pytest.approx(average, abs=0.1)
