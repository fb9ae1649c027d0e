"""A chat model of every family with the files beside its weights that published folders have.

The names of tokens, classes and keys are those of the chat models that the families have on the
hub; the vocabularies are bytes and a few merges, and the templates are short ones of their form.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import hub_folders
import jax
import numpy as np
import tokenizers as hf
from tiny import normal_params

from tokenformer_jax.convert import families
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.model.lm import define_lm

ROWS = 320  # of the embedding
_TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
_CHATML = '{%- for m in messages %}' + _TURN + '{%- endfor %}' + _ASK + '{%- endif %}'
# Qwen 3 skips its thoughts if it is asked to.
_QWEN3 = (
  '{%- for m in messages %}' + _TURN + '{%- endfor %}' + _ASK + '{%- if enable_thinking is defined '
  "and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
_SMOLLM3 = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}
{{- m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_LLAMA3 = (
  '{{- bos_token }}{%- for m in messages %}'
  "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}"
  '{%- endfor %}{%- if add_generation_prompt %}'
  "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
_MISTRAL = (
  "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
  "{{- ' ' + m.content + eos_token }}{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}"
  '{%- endif %}{%- endfor %}'
)
_PHI3 = (
  "{% for m in messages %}{{'<|' + m.role + '|>\\n' + m.content + '<|end|>\\n'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_OLMO2 = (
  "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}"
  "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_GEMMA = (
  "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role"
  " %}{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)


class Published(NamedTuple):
  """What a published folder has.

  Attributes:
    specials: the tokens after those of the vocabulary, in the order of their ids.
    settings: of tokenizer_config.json.
    template: of conversations.
    generation: of generation_config.json; names of tokens stand for their ids.
    words: whether the vocabulary is one of words with spaces, as SentencePiece makes them.
    first: the token that the tokenizer adds before a text.
    files: more files; tables are JSON, `LISTED` in added_tokens.json is the added tokens.
    flags: of added tokens.
  """

  specials: tuple[str, ...]
  settings: dict[str, Any]
  template: str = ''
  generation: dict[str, Any] = {}  # noqa: RUF012
  words: bool = False
  first: str = ''
  files: dict[str, Any] = {}  # noqa: RUF012
  flags: dict[str, dict[str, bool]] = {}  # noqa: RUF012


_QWEN_FILES = {'merges.txt': '#version: 0.2\n', 'vocab.json': {'a': 64}}
_QWEN_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<think>', '</think>')
_QWEN = {
  'add_bos_token': False,
  'add_prefix_space': False,
  'additional_special_tokens': ['<|im_start|>', '<|im_end|>'],
  'bos_token': None,
  'clean_up_tokenization_spaces': False,
  'eos_token': '<|im_end|>',
  'errors': 'replace',
  'model_max_length': 131072,
  'pad_token': '<|endoftext|>',
  'split_special_tokens': False,
  'tokenizer_class': 'Qwen2Tokenizer',
  'unk_token': None,
}
_QWEN_ENDS = {'bos_token_id': '<|endoftext|>', 'pad_token_id': '<|endoftext|>', 'do_sample': True}
_QWEN_ENDS |= {'eos_token_id': ['<|im_end|>', '<|endoftext|>'], 'transformers_version': '4.51.0'}
_MISTRAL_SETTINGS = {
  'add_bos_token': True,
  'add_eos_token': False,
  'add_prefix_space': True,
  'additional_special_tokens': [],
  'bos_token': '<s>',
  'clean_up_tokenization_spaces': False,
  'eos_token': '</s>',
  'legacy': False,
  'model_max_length': 1000000000000000019884624838656,
  'pad_token': None,
  'sp_model_kwargs': {},
  'spaces_between_special_tokens': False,
  'tokenizer_class': 'LlamaTokenizer',
  'unk_token': '<unk>',
  'use_default_system_prompt': False,
}
_MISTRAL_ENDS = {'_from_model_config': True, 'bos_token_id': '<s>', 'eos_token_id': '</s>'}
_MISTRAL_NAMED = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
_MODEL = {'tokenizer.model': '\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02'}
_GEMMA_SETTINGS = {
  'add_bos_token': True,
  'add_eos_token': False,
  'additional_special_tokens': ['<start_of_turn>', '<end_of_turn>'],
  'bos_token': '<bos>',
  'clean_up_tokenization_spaces': False,
  'eos_token': '<eos>',
  'legacy': None,
  'model_max_length': 1000000000000000019884624838656,
  'pad_token': '<pad>',
  'sp_model_kwargs': {},
  'spaces_between_special_tokens': False,
  'tokenizer_class': 'GemmaTokenizer',
  'unk_token': '<unk>',
  'use_default_system_prompt': False,
}
_GEMMA_NAMED = {f'{name}_token': {'content': f'<{name}>'} for name in ('bos', 'eos', 'pad', 'unk')}
_GEMMA_ENDS = {'bos_token_id': '<bos>', 'pad_token_id': '<pad>'}
_GEMMA_ENDS |= {'eos_token_id': ['<eos>', '<end_of_turn>'], 'cache_implementation': 'hybrid'}
_gemma = functools.partial(
  Published, template=_GEMMA, words=True, first='<bos>', settings=_GEMMA_SETTINGS
)
_GEMMA_TOKENS = ('<start_of_turn>', '<end_of_turn>')
_GEMMA_FILES = {'special_tokens_map.json': _GEMMA_NAMED, **_MODEL}
_NEOX = dict.fromkeys(('bos_token', 'eos_token', 'unk_token'), '<|endoftext|>')
_PHI3_TOKENS = ('<|endoftext|>', '<|assistant|>', '<|system|>', '<|end|>', '<|user|>')

FAMILIES = {
  'llama': Published(
    (
      *('<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>', '<|end_header_id|>'),
      *('<|eom_id|>', '<|eot_id|>'),
    ),
    {
      'bos_token': '<|begin_of_text|>',
      'clean_up_tokenization_spaces': True,
      'eos_token': '<|eot_id|>',
      'model_input_names': ['input_ids', 'attention_mask'],
      'model_max_length': 131072,
      'tokenizer_class': 'PreTrainedTokenizerFast',
    },
    _LLAMA3,
    {
      'bos_token_id': '<|begin_of_text|>',
      'do_sample': True,
      'eos_token_id': ['<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'],
      'temperature': 0.6,
      'top_p': 0.9,
      'transformers_version': '4.45.0.dev0',
    },
    first='<|begin_of_text|>',
    files={
      'special_tokens_map.json': {
        'bos_token': {'content': '<|begin_of_text|>', 'lstrip': False, 'normalized': False},
        'eos_token': {'content': '<|eot_id|>', 'lstrip': False, 'normalized': False},
      },
      'LICENSE.txt': 'A COMMUNITY LICENSE\n',
    },
  ),
  'mistral': Published(
    ('[INST]', '[/INST]'),
    _MISTRAL_SETTINGS,
    _MISTRAL,
    _MISTRAL_ENDS,
    words=True,
    first='<s>',
    files={'special_tokens_map.json': _MISTRAL_NAMED, **_MODEL},
  ),
  'qwen2': Published(
    _QWEN_TOKENS[:3],
    _QWEN,
    _CHATML,
    {**_QWEN_ENDS, 'repetition_penalty': 1.1, 'temperature': 0.7, 'top_k': 20, 'top_p': 0.8},
    files=_QWEN_FILES,
  ),
  'qwen3': Published(
    _QWEN_TOKENS,
    _QWEN,
    _QWEN3,
    {**_QWEN_ENDS, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95},
    files=_QWEN_FILES,
    flags={text: {'special': False} for text in ('<think>', '</think>')},
  ),
  'smollm3': Published(
    ('<|begin_of_text|>', '<|end_of_text|>', '<|im_start|>', '<|im_end|>'),
    {
      'bos_token': None,
      'clean_up_tokenization_spaces': True,
      'eos_token': '<|im_end|>',
      'fast': False,
      'model_input_names': ['input_ids', 'attention_mask'],
      'model_max_length': 131072,
      'pad_token': '<|im_end|>',
      'tokenizer_class': 'PreTrainedTokenizerFast',
    },
    generation={
      'bos_token_id': '<|begin_of_text|>',
      'do_sample': True,
      'eos_token_id': '<|im_end|>',
      'temperature': 0.6,
      'top_p': 0.95,
    },
    files={
      'chat_template.jinja': _SMOLLM3,
      'special_tokens_map.json': {
        'eos_token': {'content': '<|im_end|>', 'lstrip': False, 'rstrip': False}
      },
    },
  ),
  'phi3': Published(
    _PHI3_TOKENS,
    {
      'add_bos_token': False,
      'add_eos_token': False,
      'bos_token': '<s>',
      'clean_up_tokenization_spaces': False,
      'eos_token': '<|endoftext|>',
      'legacy': False,
      'model_max_length': 4096,
      'pad_token': '<|endoftext|>',
      'padding_side': 'left',
      'sp_model_kwargs': {},
      'tokenizer_class': 'LlamaTokenizer',
      'unk_token': '<unk>',
      'use_default_system_prompt': False,
    },
    _PHI3,
    {
      '_from_model_config': True,
      'bos_token_id': '<s>',
      'eos_token_id': ['<|endoftext|>', '<|assistant|>', '<|end|>'],
      'pad_token_id': '<|endoftext|>',
    },
    words=True,
    files={
      'special_tokens_map.json': {**_MISTRAL_NAMED, 'eos_token': '<|endoftext|>'},
      'added_tokens.json': 'LISTED',
      **_MODEL,
    },
    flags={text: {'rstrip': True} for text in _PHI3_TOKENS[1:]},
  ),
  'olmo2': Published(
    ('<|endoftext|>', '<|pad|>'),
    {
      'add_prefix_space': False,
      **_NEOX,
      'clean_up_tokenization_spaces': False,
      'model_max_length': 1000000000000000019884624838656,
      'pad_token': '<|pad|>',
      'tokenizer_class': 'GPT2Tokenizer',
    },
    _OLMO2,
    {'_from_model_config': True, 'eos_token_id': '<|endoftext|>', 'pad_token_id': '<|pad|>'},
    files={'special_tokens_map.json': {**_NEOX, 'pad_token': '<|pad|>'}, **_QWEN_FILES},
  ),
  'gemma': _gemma(
    _GEMMA_TOKENS,
    generation={**_GEMMA_ENDS, 'cache_implementation': None},
    files=_GEMMA_FILES,
  ),
  'gemma2': _gemma(_GEMMA_TOKENS, generation=_GEMMA_ENDS, files=_GEMMA_FILES),
  'gemma3_text': _gemma(
    (*_GEMMA_TOKENS, '<start_of_image>', '<end_of_image>'),
    settings={
      **_GEMMA_SETTINGS,
      'boi_token': '<start_of_image>',
      'eoi_token': '<end_of_image>',
      'image_token': '<image_soft_token>',
      'extra_special_tokens': {
        'boi_token': '<start_of_image>',
        'eoi_token': '<end_of_image>',
        'image_token': '<image_soft_token>',
      },
    },
    generation={**_GEMMA_ENDS, 'do_sample': True, 'top_k': 64, 'top_p': 0.95},
    files={
      **_GEMMA_FILES,
      'special_tokens_map.json': {**_GEMMA_NAMED, 'image_token': '<image_soft_token>'},
      'added_tokens.json': {'<image_soft_token>': ROWS},
    },
  ),
  'mixtral': Published(
    (),
    {**_MISTRAL_SETTINGS, 'add_prefix_space': None},
    _MISTRAL,
    _MISTRAL_ENDS,
    words=True,
    first='<s>',
    files={'special_tokens_map.json': _MISTRAL_NAMED, **_MODEL},
  ),
  'qwen2_moe': Published(
    _QWEN_TOKENS[:3],
    _QWEN,
    _CHATML,
    {**_QWEN_ENDS, 'repetition_penalty': 1.05, 'top_p': 0.8},
    files=_QWEN_FILES,
  ),
  'qwen3_moe': Published(
    _QWEN_TOKENS,
    _QWEN,
    _QWEN3,
    {**_QWEN_ENDS, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95},
    files=_QWEN_FILES,
  ),
  'gpt2': Published(
    ('<|endoftext|>',),
    {'model_max_length': 1024},
    generation={
      '_from_model_config': True,
      'bos_token_id': '<|endoftext|>',
      'eos_token_id': '<|endoftext|>',
      'transformers_version': '4.26.0.dev0',
    },
    files=_QWEN_FILES,
  ),
  'gpt_neox': Published(
    ('<|endoftext|>', '<|padding|>'),
    {'add_prefix_space': False, **_NEOX, 'tokenizer_class': 'GPTNeoXTokenizer'},
    files={'special_tokens_map.json': _NEOX},
  ),
}
_LETTERS = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
_BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


def _words(named: list[str], *, prefix: bool) -> hf.Tokenizer:
  """Returns a tokenizer of words with spaces; with `prefix` a text begins with one."""
  ids = {token: id_ for id_, token in enumerate([*named, *_BYTES, *'▁aeinorst', '▁a', 'in'])}
  how = {'unk_token': '<unk>', 'fuse_unk': True, 'byte_fallback': True}
  tokenizer = hf.Tokenizer(hf.models.BPE(ids, [('▁', 'a'), ('i', 'n')], **how))
  steps = [hf.normalizers.Prepend('▁')] * prefix + [hf.normalizers.Replace(' ', '▁')]
  tokenizer.normalizer = hf.normalizers.Sequence(steps) if prefix else steps[0]
  decoders = [hf.decoders.Replace('▁', ' '), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
  strip = [hf.decoders.Strip(' ', 1, 0)] * prefix
  tokenizer.decoder = hf.decoders.Sequence([*decoders, *strip])
  return tokenizer


def _letters() -> hf.Tokenizer:
  """Returns a tokenizer of bytes with two merges."""
  ids = {token: id_ for id_, token in enumerate([*_LETTERS, 'Ġa', 'in'])}
  tokenizer = hf.Tokenizer(hf.models.BPE(ids, [('Ġ', 'a'), ('i', 'n')]))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = hf.decoders.ByteLevel()
  return tokenizer


def _tokenizer(kind: str) -> hf.Tokenizer:
  """Returns the tokenizer of a family with its special tokens."""
  one = FAMILIES[kind]
  named = ['<pad>', '<eos>', '<bos>', '<unk>'] if 'gemma' in kind else ['<unk>', '<s>', '</s>']
  tokenizer = _words(named, prefix='gemma' not in kind) if one.words else _letters()
  for text in (*(named if one.words else ()), *one.specials):
    flags = {'special': True, 'normalized': False, **one.flags.get(text, {})}
    tokenizer.add_tokens([hf.AddedToken(text, **flags)])
  if kind == 'gemma3_text':  # The token of images has the first id without a row.
    free = ROWS - tokenizer.get_vocab_size()
    tokenizer.add_tokens([hf.AddedToken(f'<unused{n}>', normalized=False) for n in range(free)])
    image = hf.AddedToken('<image_soft_token>', special=True, normalized=False)
    tokenizer.add_special_tokens([image])
  if one.first:
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      f'{one.first} $A', f'{one.first} $A $B', [(one.first, tokenizer.token_to_id(one.first))]
    )
  return tokenizer


def write(folder: Path, kind: str, *, positions: int = 128, **changes: Any) -> Path:
  """Writes the folder of a family with random parameters; changes are of its config.json."""
  one, family, tokenizer = FAMILIES[kind], families.FAMILIES[kind], _tokenizer(kind)
  length = 'n_positions' if kind == 'gpt2' else 'max_position_embeddings'
  keys = {**hub_folders.KEYS[kind], 'vocab_size': ROWS, length: positions, **changes}
  model = family.to_model(Keys(keys, 'the test', family.defaults))
  params = normal_params(define_lm(model), 0.2)
  arrays = {
    tuple(key.key for key in path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  folder.mkdir(parents=True)
  hub_folders.write_model(folder, model, arrays.__getitem__)

  def to_ids(value: Any) -> Any:
    if isinstance(value, list):
      return [*map(to_ids, value)]
    return tokenizer.token_to_id(value) if isinstance(value, str) else value

  generation = {k: to_ids(v) if k.endswith('token_id') else v for k, v in one.generation.items()}
  tokens = {'eos_token': '<|endoftext|>', **one.settings}
  ends = {
    f'{name}_id': to_ids(tokens.get(name)) for name in ('bos_token', 'eos_token', 'pad_token')
  }
  named = {'architectures': [family.architecture], 'model_type': kind, 'torch_dtype': 'float32'}
  added = {str(id_): _fields(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
  settings = dict(sorted({**one.settings, 'added_tokens_decoder': added}.items()))
  settings |= {'chat_template': one.template} if one.template else {}
  files = {
    'config.json': {**named, **keys, **ends, 'initializer_range': 0.02, 'use_cache': True},
    'tokenizer_config.json': one.settings if kind == 'gpt2' else settings,
    **({'generation_config.json': generation} if generation else {}),
    **one.files,
  }
  if files.get('added_tokens.json') == 'LISTED':
    files['added_tokens.json'] = {text: tokenizer.token_to_id(text) for text in one.specials}
  tokenizer.save(str(folder / 'tokenizer.json'))
  for name, content in files.items():
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + '\n'
    (folder / name).write_bytes(text.encode())
  return folder


def _fields(token: hf.AddedToken) -> dict[str, Any]:
  flags = ('content', 'lstrip', 'normalized', 'rstrip', 'single_word', 'special')
  return {flag: getattr(token, flag) for flag in flags}
