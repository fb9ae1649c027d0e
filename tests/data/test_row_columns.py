"""Columns beside a conversation or a pair are used, known as harmless, or refused by name."""

import datetime
import itertools
import json

import pytest

from tokenformer_jax.data import chat_rows, corpus, preference_rows, row_columns, text
from tokenformer_jax.data.chat_template import OURS, Template
from tokenformer_jax.errors import UserError

LABEL = 'a.jsonl, line 3,'
ASKED, GOOD, BAD = 'What is two and two?', 'It is four.', 'It is five.'
USER, ANSWER, WORSE = (
  {'role': role, 'content': content}
  for role, content in (('user', ASKED), ('assistant', GOOD), ('assistant', BAD))
)
CHAT, WORSE_CHAT = [USER, ANSWER], [USER, WORSE]
GPT = [{'from': 'human', 'value': ASKED}, {'from': 'gpt', 'value': GOOD}]
SCORES = {'toxicity': 0.0, 'insult': 1.0}
WHEN = datetime.datetime(2024, 5, 3, tzinfo=datetime.UTC)

# The columns of sets on the hub, by their cards; each is read with all of them.
CHATS = {
  'OpenHermes 2.5': {
    **{'conversations': GPT, 'source': 'airoboros', 'category': 'math', 'id': None, 'idx': '1'},
    **{'skip_prompt_formatting': False, 'custom_instruction': False, 'avatarUrl': None, 'views': 1},
    **{'model': None, 'model_name': 'GPT-4', 'hash': [1], 'language': 'en', 'title': 'A long text'},
    **{'topic': 'sums', 'system_prompt': None},
  },
  'UltraChat 200k': {'prompt': ASKED, 'prompt_id': 'f0', 'messages': CHAT},
  'No Robots': {'prompt': ASKED, 'prompt_id': '1', 'messages': CHAT, 'category': 'Open QA'},
  'SmolTalk': {'messages': CHAT, 'source': 'smol-magpie-ultra', 'full_topic': 'sums/small ones'},
  'SmolTalk 2': {
    **{'messages': CHAT, 'source': 'Mixture-of-Thoughts'},
    'chat_template_kwargs': {'enable_thinking': False, 'python_tools': [], 'xml_tools': []},
  },
  'Tulu 3': {'id': 'a_1', 'messages': CHAT, 'source': 'ai2-adapt-dev/flan', 'dataset': 'flan'},
  'Tulu 2': {'dataset': 'flan', 'id': '1', 'messages': CHAT},
  'WildChat': {
    **{
      'conversation_hash': 'f',
      'model': 'gpt-4',
      'timestamp': WHEN,
      'turn': 1,
      'language': 'English',
    },
    'conversation': [
      {**one, 'language': 'English', 'redacted': False, 'toxic': False, 'timestamp': WHEN}
      | {'country': 'Peru', 'state': 'Lima', 'hashed_ip': 'a', 'header': {'user-agent': 'b'}}
      | {'turn_identifier': 101}
      for one in CHAT
    ],
    **{'openai_moderation': [{'flagged': False}], 'detoxify_moderation': [SCORES], 'toxic': False},
    **{
      'redacted': True,
      'state': 'Lima',
      'country': 'Peru',
      'hashed_ip': 'a',
      'header': {'a': 'b'},
    },
  },
  'LMSYS Chat 1M': {
    **{'conversation_id': 'a', 'model': 'vicuna-13b', 'conversation': CHAT, 'turn': 1},
    **{'language': 'English', 'openai_moderation': [{'flagged': True}], 'redacted': False},
  },
  'OpenOrca': {'id': 'cot.1', 'system_prompt': '', 'question': ASKED, 'response': GOOD},
  'Dolly': {'instruction': ASKED, 'context': '', 'response': GOOD, 'category': 'open_qa'},
  'Alpaca': {
    **{'instruction': ASKED, 'input': '', 'output': GOOD},
    'text': f'### Instruction:\n{ASKED}\n\n### Response:\n{GOOD}',
  },
  'Open-Platypus': {'instruction': ASKED, 'input': '', 'output': GOOD, 'data_source': 'reclor'},
  'MetaMathQA': {'type': 'GSM', 'query': ASKED, 'original_question': 'One?', 'response': GOOD},
  'Alpaca of Python': {
    **{'instruction': ASKED, 'input': '', 'output': GOOD},
    'prompt': f'Below is an instruction.\n{ASKED}\n### Output:\n{GOOD}',
  },
  'WizardLM Evol': {'idx': 'abc', 'conversations': GPT},
  'SlimOrca': {'conversations': [{**one, 'weight': None} for one in GPT]},
  'Hermes function calling': {
    **{'id': '1', 'conversations': GPT, 'tools': '[]', 'category': 'a', 'subcategory': 'b'},
    **{'task': 'Sum two numbers', 'source': 'glaive', 'schema': None},
  },
  'ToolACE': {'system': '', 'conversations': [{'from': 'user', 'value': ASKED}, GPT[1]]},
  'Magpie Pro': {
    **{'uuid': 'a', 'model': 'meta-llama/Llama-3', 'instruction': ASKED, 'response': GOOD},
    **{'gen_input_configs': {'temperature': 1.0}, 'conversations': GPT, 'task_category': 'Math'},
    **{
      'other_task_category': ['Planning'],
      'difficulty': 'easy',
      'intent': 'The user wants a sum.',
    },
    **{'knowledge': 'One has to know how to add.', 'input_quality': 'good', 'language': 'EN'},
    **{'quality_explanation': 'The query is clear and correct.', 'llama_guard_2': 'safe'},
    **{
      'reward_model': 'a',
      'instruct_reward': 1.0,
      'min_neighbor_distance': 0.0,
      'repeat_count': 0,
    },
    **{'min_similar_uuid': None, 'base_output': 'It is about four.', 'base_reward': 0},
  },
  'OpenThoughts': {'system': '', 'conversations': GPT, 'difficulty': 8, 'domain': 'math'},
  'OpenR1 Math': {
    **{'problem': ASKED, 'solution': 'Count them; there are 4.', 'answer': '4', 'messages': CHAT},
    **{'problem_type': 'Algebra', 'question_type': 'open', 'source': 'olympiads', 'uuid': 'a'},
    **{'is_reasoning_complete': [True, False], 'generations': ['a', 'b'], 'correctness_count': 1},
    **{'correctness_math_verify': [True, False], 'finish_reasons': ['stop'], 'num_tokens': 1},
  },
  'NuminaMath CoT': {'source': 'amc', 'problem': ASKED, 'solution': GOOD, 'messages': CHAT},
  'Nemotron post-training': {
    **{'uuid': 'a', 'license': 'cc', 'generator': 'R1', 'version': 'v1', 'category': 'math'},
    **{'reasoning': 'on', 'messages': CHAT, 'metadata': '{"a": 1}', 'used_in_training': 'yes'},
  },
  'Nemotron of messages and an output': {
    **{'input': [USER], 'output': GOOD, 'category': 'math', 'license': 'cc', 'reasoning': 'off'},
    **{'generator': 'R1', 'used_in_training': 'no', 'version': '1', 'system_prompt': ''},
  },
  'OpenCodeReasoning': {
    **{
      'id': '1',
      'input': ASKED,
      'output': GOOD,
      'source': 'atcoder',
      'license': 'cc',
      'split': 'a',
    },
    **{'dataset': 'taco', 'difficulty': '2', 'solution': 'four'},
  },
  'UltraFeedback as conversations': {
    **{'prompt': ASKED, 'prompt_id': 'a', 'messages': CHAT, 'chosen': CHAT, 'rejected': WORSE_CHAT},
    **{'score_chosen': 9.0, 'score_rejected': 1.0},
  },
  'KTO mix': {'prompt': [USER], 'completion': [ANSWER], 'label': True},
  'OpenAI with tools': {'messages': CHAT, 'tools': [], 'parallel_tool_calls': False},
  'thoughts that are in the answer': {
    'messages': [USER, {**ANSWER, 'content': f'<think>Two, two: four.</think>{GOOD}'}],
    'reasoning': 'Two, two: four.\n',
  },
}
PAIRS = {
  'UltraFeedback binarized': {
    **{'prompt': ASKED, 'prompt_id': 'a', 'chosen': CHAT, 'rejected': WORSE_CHAT, 'messages': CHAT},
    **{'score_chosen': 9.0, 'score_rejected': 1.0},
  },
  'UltraFeedback of Argilla': {
    **{'source': 'evol', 'instruction': ASKED, 'chosen_response': GOOD, 'rejected_response': BAD},
    **{'chosen_avg_rating': 5.0, 'rejected_avg_rating': 1.0, 'chosen_model': 'gpt-4'},
  },
  'UltraFeedback cleaned': {
    **{'source': 'evol', 'prompt': ASKED, 'chosen': CHAT, 'rejected': WORSE_CHAT},
    **{'chosen-rating': 5.0, 'chosen-model': 'a', 'rejected-rating': 1, 'rejected-model': 'b'},
  },
  'Orca pairs of Intel': {'system': '', 'question': ASKED, 'chosen': GOOD, 'rejected': BAD},
  'Orca pairs of Argilla': {
    **{'system': '', 'input': ASKED, 'chosen': GOOD, 'rejected': BAD, 'generations': [GOOD, BAD]},
    **{
      'order': ['a', 'b'],
      'labelling_model': 'gpt-4',
      'labelling_prompt': [USER],
      'rating': [9, 1],
    },
    **{'raw_labelling_response': 'The first is good.', 'rationale': 'The first is right.'},
    **{'status': 'swapped', 'original_chosen': BAD, 'original_rejected': GOOD, 'chosen_score': 9.0},
    'in_gsm8k_train': False,
  },
  'Tulu 3 preferences': {
    **{'id': 'a', 'source': 'b', 'prompt': ASKED, 'chosen': CHAT, 'rejected': WORSE_CHAT},
    **{'chosen_model': 'a', 'rejected_model': 'b'},
  },
  'ORPO mix 40k': {
    **{'source': 'a', 'chosen': CHAT, 'rejected': WORSE_CHAT, 'prompt': ASKED, 'question': ASKED},
  },
  'DPO mix 7k': {
    **{'dataset': 'a', 'chosen': CHAT, 'rejected': WORSE_CHAT, 'chosen_rating': 1.0},
    'rejected_rating': 0.0,
  },
  'Capybara pairs': {
    **{'source': 'a', 'conversation': [{'input': ASKED, 'output': GOOD}], 'prompt': ASKED},
    **{'original_response': GOOD, 'generation_prompt': ['a'], 'raw_generation_responses': ['b']},
    **{'new_generations': ['c'], 'chosen': CHAT, 'rejected': WORSE_CHAT, 'rating_chosen': 5},
  },
  'HH with a prompt': {
    'prompt': ASKED,
    'response': f' {GOOD}',
    'chosen': f' {GOOD}',
    'rejected': BAD,
  },
  'Snorkel': {
    **{'prompt_id': 'a', 'prompt': ASKED, 'all_generated_responses': [GOOD, BAD]},
    **{'all_rm_scores': [1.0, 0.0], 'chosen': CHAT, 'rejected': WORSE_CHAT},
  },
  'Truthy': {
    'id': '1',
    'source': 'a',
    'system': '',
    'prompt': ASKED,
    'chosen': GOOD,
    'rejected': BAD,
  },
  'LLaMA-Factory, Alpaca': {'instruction': ASKED, 'input': '', 'chosen': GOOD, 'rejected': BAD},
  'LLaMA-Factory, ShareGPT': {
    **{'conversations': GPT[:1], 'chosen': GPT[1], 'rejected': {'from': 'gpt', 'value': BAD}},
  },
  'axolotl': {'messages': [USER], 'chosen': ANSWER, 'rejected': WORSE},
  'OpenAI': {
    'input': {'messages': [USER], 'tools': [], 'parallel_tool_calls': True},
    **{'preferred_output': [ANSWER], 'non_preferred_output': [WORSE]},
  },
  'ms-swift': {'messages': CHAT, 'rejected_response': BAD},
  'ms-swift, messages': {'messages': CHAT, 'rejected_messages': WORSE_CHAT},
  'a prompt that both begin with': {'prompt': [USER], 'chosen': CHAT, 'rejected': WORSE_CHAT},
}


def _said(messages) -> list[str]:
  return [one['content'] for one in messages if one['role'] == 'assistant']


@pytest.mark.parametrize('name', CHATS)
def test_conversations_of_the_hub_are_read_with_all_their_columns(name):
  chat = chat_rows.parse_row(CHATS[name], LABEL)
  assert chat.messages[0]['content'] == ASKED and chat.messages[-1]['content'].endswith(GOOD)
  assert len(chat.messages) == 2


@pytest.mark.parametrize('name', PAIRS)
def test_pairs_of_the_hub_are_the_same_pair(name):
  pair = json.loads(preference_rows.conversation(PAIRS[name], LABEL))
  contents = [[(one['role'], one['content'].strip()) for one in messages] for messages, _ in pair]
  assert contents == [[('user', ASKED), ('assistant', answer)] for answer in (GOOD, BAD)]


VERDICTS = [
  *({'label': 'undesirable'}, {'label': -1}, {'feedback': 'bad'}, {'accepted': 'no'}),
  *({name: value} for name in ('label', 'kto_tag', 'weight') for value in (False, 0, '0', 'False')),
  *({'is_good': value} for value in (True, False, 1, 0, '1', 'true')),
  *({name: True} for name in ('desirable', 'hallucinated', 'enable_thinking', 'refusal')),
  *({name: 1} for name in ('accepted', 'thumbs_up', 'correct', 'is-correct')),
]
TEXTS = [
  {'history': [['q', 'a']]},
  {'completion': 'Five.'},
  {'context': 'Numbers are sums.'},
  {'documents': [{'text': 'x'}]},
  {'images': ['a.png']},
  {'reasoning': 'Two, two.'},
  {'system': 'Be brief.', 'system_prompt': 'Be long.'},
  {'loss_mask': [0, 1]},
  {'earlier': [{'role': 'user', 'content': 'What?'}]},
  *({name: value} for name in ('input', 'query', 'prompt') for value in (1, '1', True, 'true')),
]


@pytest.mark.parametrize('form', ['messages', 'texts', 'pair'])
@pytest.mark.parametrize('more', [*VERDICTS, *TEXTS], ids=str)
def test_a_column_that_would_be_lost_is_refused_by_name(form, more):
  why = 'may mark a bad answer' if more in VERDICTS else 'its messages do not say and would be lost'
  rows = {
    'messages': {'messages': CHAT},
    'texts': {'instruction': ASKED, 'output': GOOD},
    'pair': {'chosen': CHAT, 'rejected': WORSE_CHAT},
  }
  if form == 'texts':  # An instruction has an input, or a context.
    more = {{'context': 'history', 'input': 'query'}.get(name, name): more[name] for name in more}
  read = preference_rows.conversation if form == 'pair' else chat_rows.conversation
  with pytest.raises(UserError, match=rf'line 3, has ({"|".join(more)}) .*, which {why}; write it'):
    read({**rows[form], **more}, LABEL)


@pytest.mark.parametrize('name', ['label', 'kto_tag', 'weight', 'train'])
def test_a_label_of_a_good_answer_is_no_mistake(name):
  for good in (True, 1, 1.0, '1', 'True'):
    assert chat_rows.parse_row({'messages': CHAT, name: good}, LABEL).messages == CHAT


DEEP: list = []
for _ in range(2000):  # deeper than Python writes as JSON
  DEEP = [DEEP]
VALUES = [
  *(
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    float('inf'),
    float('nan'),
    10**30,
    '',
    ' ',
    'a',
    'true',
    '1',
  ),
  *('{', '[]', '{}', '[1]', '{"a": 1}', '\ud800', [], {}, [None], [1], [True], ['a'], [[]], [{}]),
  *(DEEP, {'role': [1], 'content': [2]}, {'role': ['user'], 'content': [None]}),
  *(
    {'role': 'user'},
    [{'role': None}],
    [{'role': 'user', 'content': 1}],
    [{'from': [], 'value': {}}],
  ),
  *(
    [USER, None],
    [USER, 'a'],
    [{'from': 'function_call', 'value': 'f(1)'}],
    {'messages': 1},
    [USER],
  ),
]
KNOWN = (*sorted(row_columns._TEXTS), 'label', 'kto_tag', 'chosen', 'rejected', 'other')
CHAT_FORMS = [CHATS[name] for name in ('OpenHermes 2.5', 'UltraChat 200k', 'OpenOrca', 'KTO mix')]
PAIR_FORMS = [*PAIRS.values(), {'chosen': f'A {GOOD}', 'rejected': f'A {BAD}'}]


def _columns_changed(row, names):
  """Yield a row with each value in each of some columns."""
  yield from ({**row, name: value} for name in names for value in VALUES)


def _messages_changed(row):
  """Yield a row with each value in each key of each of its messages."""
  for name, turns in row.items():
    is_list = isinstance(turns, list)
    for turn in [one for one in (turns if is_list else [turns]) if isinstance(one, dict)]:
      for key in (*turn, 'tool_calls', 'weight', 'name'):
        for value in VALUES:
          other = {**turn, key: value}
          yield {
            **row,
            name: [other if one is turn else one for one in turns] if is_list else other,
          }


@pytest.mark.parametrize('field', [text.CHAT, text.PAIRS], ids=['chats', 'pairs'])
def test_any_value_anywhere_in_a_row_is_read_or_refused_in_a_sentence(field):
  forms = CHAT_FORMS if field == text.CHAT else PAIR_FORMS
  rows = [row for form in forms for row in _columns_changed(form, form)]
  rows += _columns_changed(forms[0], KNOWN)
  documents = [text.document(row, field, LABEL) for row in rows]
  refused = sum(isinstance(one, UserError) for one in documents)
  assert 0.2 < refused / len(rows) < 0.8, 'the rows are all good or all bad'
  assert all(isinstance(one, str | UserError) for one in documents)


@pytest.mark.parametrize('field', [text.CHAT, text.PAIRS], ids=['chats', 'pairs'])
def test_any_value_in_a_message_is_read_and_written_or_refused_in_a_sentence(field):
  forms = CHAT_FORMS[2:] if field == text.CHAT else PAIR_FORMS[12:16]
  template, read = Template('T', OURS, {}), 0
  for row in itertools.chain(*map(_messages_changed, forms)):
    document = text.document(row, field, LABEL)
    if not isinstance(document, UserError):
      read += bool([*corpus._rendered(document, 'train', template, text.ignore)])
  assert read > 20, 'no row is good'
