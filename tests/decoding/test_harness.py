"""What lm-evaluation-harness finds is what one forward pass for each request says."""

import dataclasses
import functools
import unittest.mock
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
import released
import tiny_run
import tokenizers as hf
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from tiny_trained import LENGTH, log_probs, score, trained

from tokenformer_jax.data.tokenizers import HuggingFaceTokenizer
from tokenformer_jax.decoding import harness
from tokenformer_jax.decoding.decode import Request
from tokenformer_jax.decoding.harness import TokenFormerLM
from tokenformer_jax.decoding.sampling import Sampling
from tokenformer_jax.decoding.score import Scorer
from tokenformer_jax.errors import UserError

TASKS = ('last_word', 'choices', 'options', 'rolling', 'generation')
TOLERANCE = 1e-4
END = 0xFF  # of a document, in bytes
BATCH = 5  # rows


class BruteForce(LM):
  """A model by one row at a time, without batches, buckets or a cache; no code in common."""

  def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
    return [_scored(*request.args) for request in requests]

  def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
    return [_rolled(*request.args) for request in requests]

  def generate_until(self, requests: list[Instance]) -> list[str]:
    return [_written(*request.args) for request in requests]


def _scored(context: str, continuation: str) -> tuple[float, bool]:
  return score(context.encode() or [END], continuation.encode(), LENGTH)


def _rolled(text: str) -> float:
  """Windows one after the other, the last one with as much context as there is room for."""
  stream = [END, *text.encode()]
  total = 0.0
  for first in range(0, len(stream) - 1, LENGTH):
    last = min(first + LENGTH, len(stream) - 1)
    start = max(0, last - LENGTH)
    found = log_probs(stream[start:last], LENGTH)[first - start :]
    targets = stream[first + 1 : last + 1]
    total += sum(row[token] for row, token in zip(found, targets, strict=True))
  return total


def _written(context: str, settings: dict[str, Any]) -> str:
  ids, new = list(context.encode()), []
  while len(new) < settings['max_gen_toks'] and END not in new:
    new.append(int(log_probs([*ids, *new], LENGTH)[-1].argmax()))
  text = bytes(new[: new.index(END)] if END in new else new).decode(errors='replace')
  for string in settings['until']:
    text = text.partition(string)[0]
  return text


@functools.cache
def _scorer() -> Scorer:
  model = trained()
  return Scorer(model.definition, model.params, model.mesh, max_length=LENGTH, batch_size=BATCH)


@functools.cache
def _model() -> TokenFormerLM:
  return TokenFormerLM(trained(), _scorer())


@pytest.fixture(scope='module', autouse=True)
def _local_data(tmp_path_factory):
  """The harness's data sets are read where the tests are, and kept nowhere else."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path_factory.mktemp('datasets'))
    patch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)  # It takes seconds.
    patch.chdir(tiny_run.ROOT)
    yield


@functools.cache
def _results(*, brute_force: bool) -> dict[str, Any]:
  manager = TaskManager(include_path='tests/tasks', include_defaults=False)
  return lm_eval.simple_evaluate(
    model=BruteForce() if brute_force else _model(),
    tasks=[f'local_{task}' for task in TASKS],
    task_manager=manager,
    bootstrap_iters=0,
    torch_random_seed=None,
  )


def _found_and_wanted(task: str) -> list[list[Any]]:
  """The responses of the model, and those by brute force."""
  return [
    [
      response
      for sample in sorted(results['samples'][f'local_{task}'], key=lambda s: s['doc_id'])
      for (response,) in sample['resps']
    ]
    for results in (_results(brute_force=False), _results(brute_force=True))
  ]


def _request(*arguments: Any, kind: str = 'loglikelihood') -> Instance:
  return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def _log_prob(context: str, continuation: str) -> float:
  return _model().loglikelihood([_request(context, continuation)], disable_tqdm=True)[0][0]


@pytest.mark.parametrize('task', ['last_word', 'choices', 'options'])
def test_log_likelihoods_are_those_of_brute_force(task):
  found, wanted = _found_and_wanted(task)
  np.testing.assert_allclose([r[0] for r in found], [r[0] for r in wanted], atol=TOLERANCE, rtol=0)
  assert [r[1] for r in found] == [r[1] for r in wanted], 'another continuation is the greedy one'


def test_texts_are_those_of_greedy_decoding_without_a_cache():
  found, wanted = _found_and_wanted('generation')
  assert found == wanted


@pytest.mark.parametrize('task', TASKS)
def test_metrics_are_those_of_brute_force(task):
  found, wanted = (_results(brute_force=b)['results'][f'local_{task}'] for b in (False, True))
  names = [name for name in wanted if ',' in name and isinstance(wanted[name], float)]
  assert names, f'the harness reports nothing on {task}'
  for name in names:
    np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, err_msg=name)


def test_some_contexts_are_cut():
  """Else the tests above say nothing of rows that are longer than the input."""
  samples = _results(brute_force=False)['samples']['local_choices']
  lengths = [len(''.join(s['arguments'][i])) for s in samples for i in range(4)]
  assert max(lengths) > LENGTH + 1


# Consistency


def test_an_empty_context_is_the_end_of_a_document():
  found = _log_prob('', 'Now is better than never.')
  rolling = _request('Now is better than never.', kind='loglikelihood_rolling')
  (wanted,) = _model().loglikelihood_rolling([rolling], disable_tqdm=True)
  assert abs(found - wanted) < TOLERANCE, 'a text that fits is scored otherwise when it rolls'


def test_spaces_that_end_a_context_belong_to_the_continuation():
  """So that a tokenizer sees words with the space before them."""
  assert _log_prob('Simple is ', 'better') == _log_prob('Simple is', ' better')


@pytest.mark.parametrize(
  ('begin', 'before', 'alone', 'named'),
  [
    pytest.param((5,), [5], [5], {}, id='llama'),
    pytest.param((), [], [0], {}, id='gpt2'),
    pytest.param((), [], [33], {'bos_token': 'A'}, id='smollm2'),
    pytest.param((0,), [], [0], {}, id='trained here'),
  ],
)
def test_texts_begin_as_the_folder_of_the_model_says(tmp_path, begin, before, alone, named):
  """Only the context does: a continuation has no beginning of its own."""
  file = hf.Tokenizer.from_file(str(released.write_tokenizer(tmp_path)))
  stored = HuggingFaceTokenizer(file, begin=begin, named=named).to_json()
  meta = dataclasses.replace(trained().meta, tokenizer=stored)
  lm = TokenFormerLM(dataclasses.replace(trained(), meta=meta), _scorer())
  a, b, c = (ord(letter) - 32 for letter in 'ABC')
  requests = [_request('A', 'BC'), _request('', 'BC')]
  found = lm.loglikelihood(requests, disable_tqdm=True)
  wanted = [score([*before, a], [b, c], LENGTH), score(alone, [b, c], LENGTH)]
  np.testing.assert_allclose([r[0] for r in found], [r[0] for r in wanted], atol=TOLERANCE, rtol=0)
  rolling = _request('BC', kind='loglikelihood_rolling')
  (rolled,) = lm.loglikelihood_rolling([rolling], disable_tqdm=True)
  assert abs(rolled - wanted[1][0]) < TOLERANCE, 'a second beginning is scored'
  asked = _asked({'until': [], 'max_gen_toks': 1}, ['AB', ''], lm)
  assert [request.prompt for request in asked] == [[*before, a, b], alone]


# Generation


def _asked(settings: dict[str, Any], contexts: list[str], lm: TokenFormerLM) -> list[Request]:
  """Return the requests that reach the decoder; a stand-in for it writes no text."""
  requests = [_request(context, settings, kind='generate_until') for context in contexts]
  with unittest.mock.patch.object(lm, '_decoder') as decoder:
    decoder.return_value = [np.array([], np.int32)] * len(requests)
    lm.generate_until(requests)
  return decoder.call_args.args[1]


def test_a_context_leaves_room_for_the_text():
  """Of a context that is too long, the end counts: all but 12 of the 48 tokens."""
  end = 'b' * (LENGTH - 12)
  asked = _asked({'until': [], 'max_gen_toks': 12}, ['a' * 99 + end, end], _model())
  assert [(request.prompt, request.length) for request in asked] == 2 * [([*end.encode()], 12)]


def test_repeated_requests_are_drawn_anew():
  settings = {'until': [], 'max_gen_toks': 12, 'do_sample': True, 'temperature': 1.5}
  asked = _asked(settings, ['Beautiful is'] * 3, _model())
  wanted = [Sampling(temperature=1.5, top_p=1.0, seed=seed) for seed in range(3)]
  assert [request.sampling for request in asked] == wanted


@pytest.mark.parametrize(
  ('settings', 'sentence'),
  [
    ({'max_gen_toks': LENGTH}, f'asks for {LENGTH} tokens of text, but .* on {LENGTH} with'),
    ({'max_gen_toks': 3, 'num_beams': 4}, "sets 'num_beams' for the text to write"),
  ],
)
def test_settings_that_cannot_be_met_are_refused(settings, sentence):
  with pytest.raises(UserError, match=sentence):
    _asked(settings, ['Beautiful is'], _model())


# Tasks


@pytest.fixture
def _find(monkeypatch):
  """Finds tasks by name, those of the harness itself left out, which takes seconds."""
  monkeypatch.setattr(
    harness, 'TaskManager', functools.partial(TaskManager, include_defaults=False)
  )
  return lambda *names: harness.find_tasks(names, 'tests/tasks')


def test_tasks_come_with_their_data(_find):
  found = _find('local_options', 'local_rolling')
  assert [len(task.test_docs()) for task in found] == [5, 3]


def test_an_unknown_task_is_named_with_the_nearest_one(_find):
  with pytest.raises(UserError) as error:
    _find('local_options', 'local_choises')
  assert str(error.value) == (
    "there is no task 'local_choises' in lm-evaluation-harness; did you mean 'local_choices'?"
  )


def test_a_folder_of_tasks_that_is_not_there_is_refused():
  with pytest.raises(UserError, match='include_path=none is not a directory'):
    harness.find_tasks(['local_options'], 'none')


def test_data_that_cannot_be_fetched_is_told_in_one_sentence(_find, monkeypatch):
  """As without the internet."""

  def unreachable(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

  monkeypatch.setattr(datasets, 'load_dataset', unreachable)
  with pytest.raises(UserError) as error:
    _find('local_options')
  reason = "the data of the task 'local_options' cannot be read (ConnectionError: Couldn't reach"
  assert str(error.value).startswith(reason)
