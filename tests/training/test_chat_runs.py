"""A run on conversations answers; as a growth of a frozen model it comes out again bit for bit."""

import io
import json
import re
import shutil
import sys

import pytest
import tiny_run
from outcomes import assert_same

import tokenformer_jax
from tokenformer_jax.cli import evaluate, generate
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow

QUESTION = [{'role': 'user', 'content': 'How are you?'}]
ANSWERS = ['Fine.', 'Better.']  # to the first and the second question


@pytest.fixture(scope='module')
def root(tmp_path_factory, one_device_in_module):
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


def test_a_packed_run_resumes_bit_for_bit_and_says_what_it_learns(root, tuned, capsys):
  del tuned  # It writes the rows.
  changes = {'data__rows': 'chat', 'data__packing': 'best_fit', 'data__documents': 'separate'}
  sizes = {'data__sequence_length': 120, 'train__steps': 6, 'train__checkpoint_every': 3}
  config = tiny_run.config(f'files:{root}/rows.jsonl', root / 'cache', **changes, **sizes)
  whole = loop.train(config, root / 'packed')
  line = [line for line in metrics.read(root / 'packed') if 'train/loss' in line][-1]
  assert 0.21 < line['train/learned_share'] < 0.22
  shutil.rmtree(root / 'packed/checkpoints/6')  # as a crash would
  capsys.readouterr()
  assert_same(loop.train(config, root / 'packed'), whole, 'a resumed run')
  assert re.search('only 2[12]% of the targets are learned: raise', capsys.readouterr().err)


def test_the_command_answers_line_by_line(tuned, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdin', io.StringIO('I am kf.\n\nHow are you?\n'))
  generate.main(tuned.source, chat=True, temperature=0.0)
  assert capsys.readouterr().out.splitlines() == ANSWERS


def test_lines_of_messages_are_answered_in_batches_beside_prompts(root, tuned, capsys):
  turns = _turns('kf')
  lines = [
    {'messages': turns[:1]},
    {'prompt': 'I am', 'length': 3},
    {'messages': {'from': ['human', 'gpt', 'human'], 'value': [m['content'] for m in turns[:3]]}},
  ]
  (root / 'lines.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  generate.main(tuned.source, requests=root / 'lines.jsonl', temperature=0.0)
  first, text, second = map(json.loads, capsys.readouterr().out.splitlines())
  assert [first['text'], second['text']] == ANSWERS and second['messages'] == turns[:3]
  assert text['prompt'] == 'I am' and text['tokens'] == 3


def test_answers_are_measured_by_their_loss_and_as_greedy_decoding_writes_them(root, tuned, capsys):
  wrong = {'prompt': 'I am kf.', 'response': 'Late.'}
  rows = [{'messages': _turns('kf')}, {'messages': _turns('al')}, wrong]
  figures = tuned.evaluate(chats=rows)
  assert (figures['conversations'], figures['answers'], figures['exact']) == (3, 5, 0.8)
  alone = tuned.evaluate(chats=[wrong])
  assert alone['exact'] == 0 and alone['answer_loss'] > 1
  assert alone['answer_tokens'] == len('Late.<|end|>')
  total = figures['answer_loss'] * figures['answer_tokens']
  good = tuned.evaluate(chats=rows[:2])
  parts = [one['answer_loss'] * one['answer_tokens'] for one in (alone, good)]
  assert total == pytest.approx(sum(parts), rel=1e-4)
  in_training = tuned.metrics()[-1]['eval/loss']
  assert good['answer_loss'] == pytest.approx(in_training, rel=0.01), 'answers are read otherwise'
  (root / 'held_out.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  evaluate.main(tuned.source, chats=f'files:{root}/held_out.jsonl', output=root / 'report.json')
  assert 'exact' in capsys.readouterr().out
  report = json.loads((root / 'report.json').read_text())
  assert report['chats']['exact'] == 0.8


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
  with pytest.raises(UserError, match='base@5 was trained on plain text, so it has no chat templ'):
    base.evaluate(chats=[{'messages': QUESTION}])
  with pytest.raises(UserError, match='chats, row 1, has an empty answer'):
    tuned.evaluate(chats=[{'prompt': 'x', 'completion': ''}])
  for messages, sentence in (
    ([{'role': 'assistant', 'content': 'x'}], 'messages end with an answer of the assistant'),
    ([{'content': 'x'}], 'messages: message 1 has no role'),
    ([{'role': 'cat', 'content': 'x'}], 'the role cat is none of system, user and assistant'),
  ):
    with pytest.raises(UserError, match=sentence):
      tuned.chat(messages)
