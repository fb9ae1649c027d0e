"""Adapt a trained model to lm-evaluation-harness (`lm_eval`).

All processes of a multi-host run compute all requests together; only the first prints and writes.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import lm_eval
import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tokenformer_jax.decoding import trained
from tokenformer_jax.decoding.decode import Decoder
from tokenformer_jax.decoding.sampling import GREEDY, Sampling
from tokenformer_jax.decoding.score import Row, Score, Scorer
from tokenformer_jax.decoding.texts import decode_text, make_request
from tokenformer_jax.errors import UserError, arg, nearest
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.runs import checkpoint

_RESAMPLES = 1000  # bootstrap samples for the errors of metrics that are not means
_TEXTS = 16  # texts to write at a time, if no batch size is given
_SETTINGS = ('until', 'max_gen_toks', 'do_sample', 'temperature', 'top_k', 'top_p')


class TokenFormerLM(TemplateLM):
  """A trained model with the interface of the harness.

  Context and continuation are tokenized together and split where the context alone would end. An
  empty context becomes the id before a text without a context (`TemplateLM`).
  """

  def __init__(self, model: trained.Trained, scorer: Scorer):
    """Wrap a model and its scorer."""
    super().__init__()
    self._model, self._scorer, self._tokenizer = model, scorer, model.tokenizer
    self._decoder = Decoder(model.config.model, model.execution)

  @property
  def eot_token_id(self) -> int:
    return self._tokenizer.end_of_document

  @property
  def prefix_token_id(self) -> int:
    """Return the id before a text without a context."""
    named = self._tokenizer.special_ids.get('bos_token', self.eot_token_id)
    return (self._tokenizer.begin or (named,))[-1]

  @property
  def max_length(self) -> int:
    """Return the most tokens of input."""
    return self._scorer.max_length

  @property
  def tokenizer_name(self) -> str:
    return self._tokenizer.fingerprint

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **unused: Any
  ) -> list[int]:
    """Return the token ids of a text, begun as the tokenizer of the model's folder begins texts.

    Texts of a model that was trained here begin with nothing: its contexts go on inside a document.
    They begin with nothing for every model if `add_special_tokens` is False.
    """
    del unused
    ids, begin = self._tokenizer.encode(string).tolist(), self._tokenizer.begin
    has_begin = add_special_tokens is not False and begin != (self.eot_token_id,)
    return [*begin, *ids] if has_begin else ids

  def loglikelihood_rolling(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Return Σ log p of whole texts, each token once, in windows that fill the context."""
    texts = [request.args[0] for request in requests]
    windows, owners = [], []
    for i, text in enumerate(texts):
      pairs = get_rolling_token_windows(
        token_list=self.tok_encode(text, add_special_tokens=False),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for pair in pairs:
        windows.append(Row(*make_disjoint_window(pair)))
        owners.append(i)
    sums = [0.0] * len(texts)
    for i, score in zip(owners, self._score(windows, disable_tqdm), strict=True):
      sums[i] += score.log_prob
    for text, log_prob in zip(texts, sums, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', (text,), log_prob)
    return sums

  def _loglikelihood_tokens(
    self,
    requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
    disable_tqdm: bool = False,
    **unused: Any,
  ) -> list[tuple[float, bool]]:
    del unused
    # `TemplateLM` moves trailing spaces to the continuation, which can leave an empty context.
    rows = [Row(context or [self.prefix_token_id], new) for _, context, new in requests]
    scores = [(score.log_prob, score.is_greedy) for score in self._score(rows, disable_tqdm)]
    for (texts, _, _), score in zip(requests, scores, strict=True):
      self.cache_hook.add_partial('loglikelihood', texts, score)
    return scores

  def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
    """Return the texts that follow contexts, up to the first of the strings `until`."""
    asked, stops = [], []
    arguments: list[Any] = [request.args for request in requests]
    for i, (context, given) in enumerate(arguments):
      settings: dict[str, Any] = {**normalize_gen_kwargs(given)}
      stop = [string for string in settings.pop('until', []) if string]
      length = settings.pop('max_gen_toks')
      if length >= self.max_length:
        raise UserError(
          f'a task asks for {length} tokens of text, but the model is evaluated on '
          f'{self.max_length} with the context; ask for fewer (max_gen_toks), or raise max_length '
          'if its positions allow it'
        )
      ids = self.tok_encode(context)[length - self.max_length :] or [self.prefix_token_id]
      asked.append(make_request(self._tokenizer, ids, length, _sampling(settings, i), stop))
      stops.append(stop)
    with jax.set_mesh(self._model.mesh):
      size = self._scorer.batch_size or _TEXTS
      params = self._decoder.prepare(self._model.params)
      written = self._decoder(params, asked, batch_size=size)
    texts = []
    for request, one, ids, stop in zip(requests, asked, written, stops, strict=True):
      texts.append(decode_text(self._tokenizer, ids.tolist(), stop, one.prompt))
      self.cache_hook.add_partial('generate_until', request.args, texts[-1])
    return texts

  def _score(self, rows: Sequence[Row], disable_tqdm: bool) -> list[Score]:
    first = hosts.is_first()
    cut = sum(len(row.context) + len(row.continuation) - 1 > self.max_length for row in rows)
    if cut and first:
      messages.say(
        f'{cut} of {len(rows)} texts are longer than {self.max_length} tokens; the beginnings of '
        'their contexts are cut'
      )
    no_bar = True if disable_tqdm or not first else None  # None shows the bar on a terminal only.
    with tqdm.tqdm(total=len(rows), desc='rows', disable=no_bar) as bar:
      return self._scorer(rows, bar.update)


def find_tasks(names: Sequence[str], include_path: str | None = None) -> list[Any]:
  """Load tasks and task groups by their names in `lm_eval ls tasks`, with their data.

  `include_path` is a directory with more tasks.
  """
  if include_path is not None and not os.path.isdir(include_path):
    raise UserError(f'{arg.include_path}={include_path} is not a directory')
  manager = TaskManager(include_path=include_path)
  tasks, task_groups = {}, {}
  for name in names:
    if name not in manager.all_tasks:
      close = difflib.get_close_matches(name, manager.all_tasks, n=1)
      hint = f'did you mean {close[0]!r}?' if close else 'list them by `lm_eval ls tasks`'
      raise UserError(f'there is no task {name!r} in lm-evaluation-harness; {hint}')
    try:
      own: Any = manager.load([name])
    except OSError as error:  # A missing connection is an OSError.
      raise UserError(
        f'the data of the task {name!r} cannot be read ({checkpoint.one_line(error)}); the harness '
        'fetches it from the internet once and then keeps it (HF_HOME)'
      ) from error
    if name in own['groups']:
      task_groups[name] = own['groups'][name]
    else:
      tasks.update(own['tasks'])
  loaded = [*tasks.values(), *task_groups.values()]
  try:
    manager.load(loaded)
  except ValueError as error:
    raise UserError(f'{arg.tasks} names a task twice: {error}') from error
  return loaded


def evaluate(
  model: TokenFormerLM, tasks: Sequence[Any], num_fewshot: int | None, limit: int | None
) -> dict[str, Any]:
  """Run tasks from `find_tasks` and return the result of each task and task group.

  Returns:
    By name `{'metrics': {METRIC: {'value': …, 'stderr': …}}, 'samples': …, 'num_fewshot': …,
    'version': …}`, with None for values that the harness does not know.
  """
  # The harness forks processes to estimate errors, which could deadlock with JAX's threads.
  os.environ.setdefault('DISABLE_MULTIPROC', '1')
  with contextlib.redirect_stdout(sys.stderr):
    run_tasks: Any = lm_eval.simple_evaluate
    results = run_tasks(
      model=model,
      tasks=list(tasks),
      num_fewshot=num_fewshot,
      limit=limit,
      log_samples=False,
      bootstrap_iters=_RESAMPLES,
      task_manager=TaskManager(include_defaults=False),  # The tasks are loaded already.
    )
  return {
    name: {
      'metrics': _metrics(result),
      'samples': results['n-samples'].get(name, {}).get('effective'),
      'num_fewshot': results['n-shot'].get(name),
      'version': results['versions'].get(name),
    }
    for name, result in results['results'].items()
  }


def _metrics(result: dict[str, Any]) -> dict[str, Any]:
  """Return metrics and errors from the harness's `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
  metrics = {}
  for key, value in result.items():
    metric, comma, by = key.partition(',')
    if not comma or metric.endswith('_stderr'):
      continue
    error = result.get(f'{metric}_stderr,{by}')
    metrics[metric if by == 'none' else key] = {
      'value': float(value),
      'stderr': float(error) if isinstance(error, (int, float)) else None,
    }
  return metrics


def _sampling(settings: dict[str, Any], i: int) -> Sampling:
  """Return the sampling of request `i` from its task's settings."""
  for name in settings:
    if name not in _SETTINGS:
      raise UserError(f'a task sets {name!r} for the text to write{nearest(name, _SETTINGS)}')
  if not settings['do_sample']:
    return GREEDY
  given = {name: settings[name] for name in ('temperature', 'top_k', 'top_p') if name in settings}
  # Each request has its own seed, because a task may ask for several texts of one request.
  return Sampling(**{'temperature': 1.0, 'top_p': 1.0, 'seed': i, **given})
