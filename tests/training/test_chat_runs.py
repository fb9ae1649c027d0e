"""A run on conversations answers; as a growth of a frozen model it comes out again bit for bit."""

import io
import json
import sys

import pytest
import tiny_run
from outcomes import assert_same

import tokenformer_jax
from tokenformer_jax.cli import generate
from tokenformer_jax.errors import UserError

pytestmark = pytest.mark.slow

QUESTION = [{'role': 'user', 'content': 'How are you?'}]
ANSWERS = ['Fine.', 'Better.']  # to the first and the second question


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  return tmp_path_factory.mktemp('chat_runs')


@pytest.fixture(scope='module')
def base(root):
  """A run on plain text."""
  source = tiny_run.write_corpus(root / 'texts')
  changes = {'train__steps': 5, 'data__tokenizer': 'bytes', 'data__sequence_length': 96}
  config = tiny_run.config(source, root / 'cache', **changes)
  return tokenformer_jax.train(config, root / 'base')


@pytest.fixture(scope='module')
def tuned(root, base):
  """The run grown by a group, which learned conversations of two questions."""
  names = [f'{a}{b}' for a in 'abcdefghij' for b in 'klmnopqrst']
  rows = [{'messages': _turns(name)} for name in names]
  (root / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  grown = base.grow(root / 'tuned', {'qkv': 48, 'proj': 48, 'ffn': 96}, step='restart')
  return grown.train(
    120,
    data={'source': f'files:{root}/rows.jsonl', 'rows': 'chat', 'documents': 'separate'},
    optim={'old_tokens': 'freeze', 'learning_rate': 1e-2, 'new_token_warmup': 5},
  )


def _turns(name: str) -> list[dict[str, str]]:
  turns = []
  for question, answer in zip((f'I am {name}.', 'How are you?'), ANSWERS, strict=True):
    turns.append({'role': 'user', 'content': question})
    turns.append({'role': 'assistant', 'content': answer})
  return turns


def test_a_tuned_model_answers_and_stops(tuned):
  turns = _turns('kf')
  for number, answer in ((1, ANSWERS[0]), (3, ANSWERS[1])):
    assert tuned.chat(turns[:number], temperature=0) == answer
  assert tuned.chat(turns[:1], temperature=0, stop=['n']) == ANSWERS[0].partition('n')[0]


def test_the_command_answers_line_by_line(tuned, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdin', io.StringIO('I am kf.\n\nHow are you?\n'))
  generate.main(tuned.source, chat=True, temperature=0.0)
  assert capsys.readouterr().out.splitlines() == ANSWERS


def test_the_base_comes_out_again_and_the_answers_go_in_again(root, base, tuned):
  restored = tuned.remove(root / 'restored')
  assert_same(restored.parameters, base.parameters, 'training of new tokens changed the base')
  tuned.extract(root / 'tokens')
  merged = base.merge(root / 'tokens', root / 'merged')
  assert_same(merged.parameters, tuned.parameters, 'merging gives another model')
  assert merged.chat(_turns('kf')[:1], temperature=0) == ANSWERS[0], 'the template is lost'


def test_bad_messages_and_runs_are_refused(base, tuned):
  with pytest.raises(UserError, match='base was trained on plain text, so it has no chat template'):
    base.chat(QUESTION)
  for messages, sentence in (
    ([{'role': 'assistant', 'content': 'x'}], 'messages end with an answer of the assistant'),
    ([{'content': 'x'}], 'messages: message 1 has no role'),
    ([{'role': 'cat', 'content': 'x'}], 'the role cat is none of system, user and assistant'),
  ):
    with pytest.raises(UserError, match=sentence):
      tuned.chat(messages)
