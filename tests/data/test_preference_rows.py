"""Rows of a chosen and a rejected answer become windows of both, in every form of TRL."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import tiny_run
from byte_text import total

from tokenformer_jax import tasks
from tokenformer_jax.data import preference_rows, shards, store
from tokenformer_jax.data.chat_template import OURS, Template
from tokenformer_jax.errors import UserError
from tokenformer_jax.resolve.facts import complete

TEMPLATE = Template('T', OURS, {})
END = 255  # of a document, by the tokenizer of bytes
USER = {'role': 'user', 'content': 'Hi'}
GOOD, BAD = ({'role': 'assistant', 'content': text} for text in ('Hello.', 'Go away.'))
FORMS = {
  'explicit texts': {'prompt': 'Hi', 'chosen': 'Hello.', 'rejected': 'Go away.'},
  'explicit lists': {'prompt': [USER], 'chosen': [GOOD], 'rejected': [BAD]},
  'implicit lists': {'chosen': [USER, GOOD], 'rejected': [USER, BAD]},
  'lists with the prompt as a text': {
    'prompt': 'Hi',
    'chosen': [USER, GOOD],
    'rejected': [USER, BAD],
  },
  'answers with the prompt as a text': {'prompt': 'Hi', 'chosen': [GOOD], 'rejected': [BAD]},
  'JSON text': {'chosen': json.dumps([USER, GOOD]), 'rejected': json.dumps([USER, BAD])},
  'ShareGPT': {
    'chosen': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Hello.'}],
    'rejected': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Go away.'}],
  },
  'with a conversation': {
    'messages': [USER],
    'chosen': [USER, GOOD],
    'rejected': [USER, BAD],
    'score_chosen': 9.0,
  },
}


def _learned(row):
  document = preference_rows.conversation(row, 'a.jsonl, line 3,')
  rendered = preference_rows.render(document, TEMPLATE)
  return [(one.text, [one.text[slice(*span)] for span in one.answers]) for one in rendered]


@pytest.mark.parametrize('form', FORMS)
def test_every_form_of_a_row_is_the_same_pair(form):
  text = '<|user|>\nHi<|end|>\n<|assistant|>\n{}<|end|>\n'
  assert _learned(FORMS[form]) == [
    (text.format(answer), [f'{answer}<|end|>']) for answer in ('Hello.', 'Go away.')
  ]


def test_answers_in_the_prompt_carry_no_loss():
  pair = _learned({'chosen': [USER, GOOD, USER, GOOD], 'rejected': [USER, GOOD, USER, BAD]})
  assert [answers for _, answers in pair] == [['Hello.<|end|>'], ['Go away.<|end|>']]


def test_arguments_of_a_row_reach_the_template_of_both_answers():
  silent = '{% if quiet %}(quiet) {% endif %}'
  row = {**FORMS['explicit texts'], 'chat_template_kwargs': {'quiet': True}}
  document = preference_rows.conversation(row, 'row 1')
  rendered = preference_rows.render(document, Template('T', silent + OURS, {}))
  assert [one.text.startswith('(quiet) <|user|>') for one in rendered] == [True, True]


def test_texts_without_a_prompt_are_plain_and_begin_with_it():
  row = {'chosen': 'Human: Hi\n\nAssistant: Thanks', 'rejected': 'Human: Hi\n\nAssistant: There'}
  assert _learned(row) == [(row['chosen'], [' Thanks']), (row['rejected'], [' There'])]


@pytest.mark.parametrize(
  ('row', 'sentence'),
  [
    ({'messages': [USER, GOOD]}, 'line 3, is no pair .* it needs chosen and rejected'),
    ({'prompt': 'Hi', 'chosen': 'A', 'rejected': 'A'}, 'chosen and rejected that are the same'),
    ({'chosen': 'Hi A', 'rejected': 'Hi A'}, 'chosen and rejected that are the same'),
    ({'chosen': 'A', 'rejected': 'B'}, 'that have no prompt in common'),
    ({'chosen': 'A B', 'rejected': 'A '}, 'or no answer after it'),
    ({'chosen': [GOOD], 'rejected': [BAD]}, 'that have no prompt in common'),
    ({'chosen': [USER, GOOD], 'rejected': [USER]}, 'or no answer after it'),
    ({'chosen': [USER, GOOD], 'rejected': 'B'}, 'that have no prompt in common'),
    ({'prompt': 'Hi', 'chosen': 'A', 'rejected': ' '}, 'line 3, has an empty answer'),
    ({'prompt': 'Hi', 'chosen': 'A', 'rejected': None}, 'message 2 has no content'),
    (
      {'prompt': 'Hi', 'chosen': 1, 'rejected': 2},
      'line 3, chosen: message 1 has 1 as its content',
    ),
  ],
)
def test_rows_that_are_no_pair_are_refused(row, sentence):
  with pytest.raises(UserError, match=sentence):
    _learned(row)


def _config(tmp_path, rows, **changes):
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  changes = {'data__rows': 'preference', 'preference__loss': 'orpo', **changes}
  return tiny_run.config(f'files:{tmp_path}/rows.jsonl', tmp_path / 'cache', **changes)


def _texts(task, row) -> list[tuple[str, str]]:
  """The text of each answer of a row of a batch, and the part of it that carries loss."""

  def text(ids) -> str:
    return bytes(ids[(ids >= 0) & (ids != END)].tolist()).decode()

  pairs = zip(*map(np.asarray, task.inputs_and_targets(row[None])), strict=True)
  return [(text(ids), text(targets)) for ids, targets in pairs]


def test_an_epoch_has_each_pair_once_and_whole(tmp_path):
  rows = [
    {'prompt': f'{i}', 'chosen': f'yes {i}' * (1 + i % 2), 'rejected': 'no'} for i in range(9)
  ]
  config = _config(tmp_path, rows, data__sequence_length=64, data__batch_size=3)
  task = tasks.make(complete(config))
  task.prepare()
  validation = [row for batch in task.validation_parts(range(3))[''] for row in batch]
  held_out = [row for row in validation if (row != -1).any()]
  assert task.examples + len(held_out) == 9
  with contextlib.closing(task.train_batches(range(task.examples), 0, 1)) as batches:
    trained = [*next(batches)]
  assert trained[0].shape == task.abstract_batch().shape[1:]
  answers = sorted([answer for _, answer in _texts(task, row)] for row in [*trained, *held_out])
  assert answers == sorted([row['chosen'] + '<|end|>', 'no<|end|>'] for row in rows)
  stage = task.at_stage(dataclasses.replace(config.data, batch_size=2))
  with contextlib.closing(stage.train_batches(range(2), 0, 1)) as batches:
    np.testing.assert_array_equal(next(batches), trained[:2], 'a stage reads other pairs')
  prompts = {text.partition('<|end|>')[0] for row in trained for text, _ in _texts(task, row)}
  assert len(prompts) == len(trained), 'the answers of a row have other prompts'


def test_a_long_pair_is_refused_and_prepare_leaves_it_out(tmp_path):
  rows = [
    {'prompt': f'{i}', 'chosen': 'yes' * (1 + i // 5 * 20), 'rejected': 'no'} for i in range(6)
  ]
  config = _config(tmp_path, rows, data__sequence_length=48)
  with pytest.raises(UserError, match=r'line 6, has an answer that takes 104 .* to 103 or more'):
    store.prepare(config.data)
  made = store.make(config.data, skip_bad=True)
  assert sum(shard.bad_documents for shard in made.index.shards) == 1
  assert total(made, 'documents') == 5
  assert len(made.train) + len(made.validation) == 5 * 2 * 49


def test_a_store_of_another_length_is_another_store(tmp_path):
  rows = [{'prompt': f'{i}', 'chosen': 'yes', 'rejected': 'no'} for i in range(5)]
  short, long = (_config(tmp_path, rows, data__sequence_length=n).data for n in (48, 64))
  assert store.store_folder(short) != store.store_folder(long)
  assert {'rows', 'sequence_length'} <= {*shards.made_from(short)}, 'a named store is of any length'
