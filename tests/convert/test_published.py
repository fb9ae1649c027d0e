"""Folders as published, of every family: in and out again, and what they say and write."""

from pathlib import Path

import published
import pytest

import tokenformer_jax
from tokenformer_jax.convert import export
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.decoding import chats
from tokenformer_jax.decoding.sampling import GREEDY
from tokenformer_jax.decoding.texts import TextRequest, decode_text
from tokenformer_jax.runs import checkpoint

SLOW = [
  pytest.param(kind, marks=pytest.mark.slow) for kind in published.FAMILIES if kind != 'qwen3'
]
CHAT = [
  {'role': 'user', 'content': 'Is a train in <|im_end|> 12?'},
  {'role': 'assistant', 'content': 'No.'},
  {'role': 'user', 'content': ' Then\nsay another one'},
]
TEXT = 'A train in the\n rain'


@pytest.mark.parametrize('kind', ['qwen3', *SLOW])
def test_in_and_out_again_changes_no_file_but_the_weights(kind, tmp_path):
  source, out = published.write(tmp_path / 'source', kind), tmp_path / 'out'
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), out)
  names = {path.relative_to(source) for path in source.rglob('*') if path.is_file()}
  more = {path.relative_to(out) for path in out.rglob('*')} - names
  assert more == {Path('README.md')}
  for name in names - {Path('model.safetensors')}:
    assert (out / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize('kind', published.FAMILIES)
def test_conversations_and_greedy_texts_are_those_of_transformers(kind, tmp_path):
  """Of the folder and of the one that goes out, whose logits are equal to rounding."""
  torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
  source = published.write(tmp_path / 'source', kind)
  run = tokenformer_jax.bring(source, tmp_path / 'run')
  run.to_hf(tmp_path / 'out')
  template = published.FAMILIES[kind].template or kind == 'smollm3'
  meta = checkpoint.open_source(tmp_path / 'run', None)[1]
  request = TextRequest(TEXT, 12, GREEDY)
  requests = [request]
  if template:
    asked = chats.question(CHAT)
    requests.append(chats.ask(chats.find_template(meta, tmp_path), asked, request))
  ours = [run.generate(TEXT, length=12, temperature=0.0)]
  if template:
    ours.append(run.chat(CHAT, length=12, temperature=0.0))
  for folder in (source, tmp_path / 'out'):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [theirs(TEXT)['input_ids']]
    if template:
      how = {'add_generation_prompt': True, 'tokenize': True, 'return_dict': True}
      prompts.append(theirs.apply_chat_template(CHAT, **how)['input_ids'])
    assert [list(one.tokens(run.tokenizer).prompt) for one in requests] == prompts
    for one, prompt, text in zip(requests, prompts, ours, strict=True):
      ids, how = torch.tensor([prompt]), {'max_new_tokens': 12, 'do_sample': False}
      mask = torch.ones_like(ids)
      made = model.generate(ids, attention_mask=mask, repetition_penalty=1.0, **how)[
        0, len(prompt) :
      ]
      assert decode_text(run.tokenizer, made.tolist(), one.stop, prompt) == text
