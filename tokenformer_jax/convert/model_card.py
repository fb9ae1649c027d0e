"""Write the README.md of a model's folder from what its run records."""

from tokenformer_jax import config as config_lib
from tokenformer_jax.convert import families, hub_download
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs import batches
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta

_USE = """\
## Use

{about}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r}{trust})
tokenizer = AutoTokenizer.from_pretrained({folder!r}{trust})
inputs = tokenizer('Once upon a time', return_tensors='pt')
written = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(written[0], skip_special_tokens=True))
```

To train on or to grow it: `tokenformer convert to-jax --source={folder} --target=RUN`.
"""


def write(meta: Meta, dtype: str, folder: str) -> str:
  """Return the text of the card of the model in a checkpoint; `folder` is the folder's name."""
  model = meta.config.model
  tokens = batches.tokens_at_checkpoint(meta)
  rows = {
    'Parameters': f'{define_lm(model).count:,}',
    'Layers': f'{model.depth} (`{model.pattern}`)',
    'Width': f'{model.width:,}',
    'Token ids': f'{model.vocab_size:,}',
    'Context of training': f'{meta.config.data.sequence_length:,} tokens',
    'Training': f'{meta.step:,} steps, {round(tokens):,} tokens'
    + (' with those before growth' if meta.lineage else ''),
    'Numbers': dtype,
  }
  if counts := config_lib.token_counts(model):
    rows['Parameter tokens'] = ', '.join(f'{name} {n:,}' for name, n in counts.items())
  base = hub_download.origin(meta.config.data.tokenizer)
  if base:
    rows['Brought from'] = f'{base[0]}, commit {base[1]}'
  table = '\n'.join(f'| {name} | {value} |' for name, value in rows.items())
  sections = [
    '---\nlibrary_name: transformers\npipeline_tag: text-generation\n'
    + (f'base_model: {base[0]}\n---' if base else '---'),
    f'# {folder}',
    'A language model that was trained with tokenformer_jax.',
    f'| | |\n|---|---|\n{table}',
    f'## Data\n\n{_data(meta)}',
  ]
  if meta.lineage:
    steps = '\n'.join(f'{i}. {_change(entry)}' for i, entry in enumerate(meta.lineage, start=1))
    sections.append(f'## Lineage\n\nThe model was made from others, in this order:\n\n{steps}')
  if matched := families.match(model, meta.family):
    about = f'The folder loads with `transformers` as a {matched[0].architecture}.'
    trust = ''
  else:
    about = 'The folder loads with `transformers` and PyTorch; the model is in its .py files.'
    trust = ', trust_remote_code=True'
  return '\n\n'.join([*sections, _USE.format(folder=folder, about=about, trust=trust)])


def _data(meta: Meta) -> str:
  """Return the sources of the training data of the run."""
  if not meta.seen.samples:
    return 'This run did not train: its weights are those of another model.'
  data = meta.config.data
  if data.mixture:
    return '\n'.join(f'- `{source.source}` ({name})' for name, source in data.mixture.items())
  return f'- `{data.source}`'


def _change(entry: Ancestor) -> str:
  """Return one entry of the lineage as a line."""
  facts = [
    f'`{entry.action}` of a model of {define_lm(entry.model).count:,} parameters',
    f'at step {entry.step:,}',
    f'groups {entry.groups}' if entry.groups else '',
    f'experts {entry.experts}' if entry.experts else '',
  ]
  return ', '.join(filter(None, facts))
