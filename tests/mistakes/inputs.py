"""Files that the mistakes are made with: broken configs, requests and the like."""

from pathlib import Path

CONFIGS = {
  'empty': '',
  'not_callable': 'get_config = 3\n',
  'syntax': 'import math\n\n\ndef get_config()\n  return math.pi\n',
  'import': 'import no_such_module_here\n\n\ndef get_config():\n  pass\n',
  'raises': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n'
    '  c = config.defaults()\n  c.train.steps = 10 // 0\n  return c\n'
  ),
  'nothing': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n  c = config.defaults()\n'
  ),
  'variants': (
    'from tokenformer_jax import config\n\nSIZES = {"small": "layer*2"}\n\n\n'
    'def get_config(variant="small"):\n  c = config.defaults()\n'
    '  c.model.pattern = SIZES[variant]\n  return c\n'
  ),
  'needs_variant': (
    'from tokenformer_jax import config\n\n\ndef get_config(variant):\n  return config.defaults()\n'
  ),
  'typo': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n'
    '  c = config.defaults()\n  c.model.widht = 64\n  return c\n'
  ),
  'wrong_type': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n'
    "  c = config.defaults()\n  c.train.steps = 'many'\n  return c\n"
  ),
  'list_of_kinds': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n'
    "  c = config.defaults()\n  c.optim.schedule = ['wsd']\n  return c\n"
  ),
  'group_lost': (
    'import ml_collections\n\n\ndef get_config():\n'
    "  return ml_collections.ConfigDict({'model': 3})\n"
  ),
  'reference': (
    'from tokenformer_jax import config\n\n\ndef get_config():\n  c = config.defaults()\n'
    "  c.optim.learning_rate = 1.0 / c.data.get_ref('batch_size').to_float() * 1e-3\n"
    '  return c\n'
  ),
}

LLAMA = (
  '{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,'
  ' "num_hidden_layers": 2, "num_attention_heads": 2}\n'
)

FILES = {
  'folder.png/a.txt': 'a picture is not a folder',
  'config.json': '{"model": {}}\n',
  'a_list/config.json': '[]\n',
  'cut/config.json': '{"model": {"layers"\n',
  'empty_run/metrics.jsonl': '',
  'no_config/metrics.jsonl': '{"step": 5, "train/loss": 3.0}\n',
  'some/a.txt': 'a text of a few words, and of a few more ' * 40,
  'some/b.txt': 'another text ' * 40,
  'mine/meta.json': '{"mine": 1}\n',
  'mine/a.txt': 'a text',
  'chat/good.jsonl': '{"prompt": "q", "response": "a"}\n',
  'chat/no_role.jsonl': '{"messages": [{"content": "q"}]}\n',
  'chat/cat.jsonl': '{"conversations": [{"from": "cat", "value": "meow"}]}\n',
  'chat/text.jsonl': '{"text": "q"}\n',
  'chat/empty.jsonl': '{"prompt": "q", "response": " "}\n',
  'chat/question.jsonl': '{"messages": [{"role": "user", "content": "q"}]}\n',
  'chat/plain.jinja': '{% for m in messages %}{{ m.content }}{% endfor %}',
  'chat/name.jinja': (
    '{% for m in messages %}{% generation %}{{ m.contents }}<|end|>{% endgeneration %}{% endfor %}'
  ),
  'chat/no_prompt.jinja': (
    '{% for m in messages %}<|{{ m.role }}|>{% if m.role == "assistant" %}{% generation %}'
    '{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}'
  ),
  'chat/cut.jinja': '{% for m in messages %}{{ m.content }}',
  'requests/empty.jsonl': '\n',
  'weights.bin': 'these are no weights',
  'weights.safetensors': 'these are no weights',
  'weights.onnx': 'these are no weights',
  'hub/unknown/config.json': '{"architectures": ["BertModel"]}\n',
  'hub/code/config.json': '{"architectures": ["X"], "auto_map": {"AutoModel": "x.Y"}}\n',
  'hub/option/config.json': LLAMA.replace('64', '64, "hidden_act": "mish"', 1),
  'hub/cut/config.json': '{"model_type": "llama"',
  'hub/shards/config.json': LLAMA,
  'hub/shards/model.safetensors.index.json': '{"weight_map": {"a": "model-1.safetensors"}}\n',
  'hub/no_weights/config.json': LLAMA,
  'hub/not_weights/config.json': LLAMA,
  'hub/not_weights/model.safetensors': 'these are no weights',
}


def write(folder: Path) -> None:
  """Writes them into a new folder."""
  for name, content in CONFIGS.items():
    (folder / 'configs').mkdir(parents=True, exist_ok=True)
    (folder / f'configs/{name}.py').write_text(content)
  for name, content in FILES.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
  """Size and time of every file, and 0 of every folder."""
  return {
    str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if path.is_file() else (0, 0)
    for path in folder.rglob('*')
    for stat in [path.stat()]
  }
