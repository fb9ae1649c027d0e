r"""Show what parameter tokens and experts of a trained model respond to, and which are used.

  tokenformer inspect --source=runs/lm_stdlib --text='def main(' --out=heat.png

The weights of a Pattention are an attention map from the tokens of a text to parameter tokens. The
command prints the parameter tokens with the largest weights on the text, with the input tokens that
cause them, and draws the maps. It counts on more text how many parameter tokens are in use. For a
model that has grown, it compares the new tokens with the old ones. The hidden units of an MLP count
as parameter tokens.

For a model with routed experts it prints the load of each layer's experts on that text, and the
tokens that the busiest experts get most; the JSON file has them for all experts.
"""

from __future__ import annotations  # Types of arrays and models are not imported.

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenformer_jax import config as config_lib
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs
from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.arguments import Count, Natural, Path, Text
from tokenformer_jax.config.section import Str
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages

if TYPE_CHECKING:
  import numpy as np

  from tokenformer_jax.decoding.trained import Trained
  from tokenformer_jax.inspection.report import Row

_FILES = 'files:'


class Texts(NamedTuple):
  """Token ids and the names of their texts."""

  shown: np.ndarray
  name: str
  corpus: np.ndarray  # to measure usage on
  corpus_name: str


def main(
  source: Text,
  *,
  text: Str = '',
  length: Count = 64,
  corpus_tokens: Count = 32768,
  layer: Natural | None = None,
  top_k: Count = 5,
  out: Path | None = None,
  json: Path | None = None,
) -> None:
  """Print tables about a run, and write a heat map and a JSON file.

  Args:
    source: A run: DIR, or DIR@STEP.
    text: A text, or files:GLOB for the text of files; empty: the run's held-out text.
    length: The number of tokens of the text to show.
    corpus_tokens: Tokens to measure usage on: from the files of --text, else from the run's
      held-out text.
    layer: The number of a layer, the first is 0; default: all.
    top_k: Parameter tokens to list for each Pattention, and inputs of each.
    out: The heat map to write: .png, .pdf or .svg.
    json: A JSON file for the output, with figures for every token.
  """
  from tokenformer_jax.data.sources import open_source
  from tokenformer_jax.inspection import heat_map
  from tokenformer_jax.inspection.model import load
  from tokenformer_jax.inspection.weights import pattentions
  from tokenformer_jax.storage import paths

  outputs.check_file('out', out, paths.PICTURES)
  outputs.check_file('json', json)
  if text.startswith(_FILES):  # Report a wrong name before the model loads.
    open_source(text, 'text', '--text')
  if out:
    heat_map.check()
  model = load(source)
  depth = model.config.model.depth
  if layer is not None and layer >= depth:
    raise UserError(f'--layer is {layer}; this model has the layers 0 to {depth - 1}')
  layers = range(depth) if layer is None else [layer]
  has_tokens = any(pattentions(model.definition)[one] for one in layers)
  if out and not has_tokens:
    raise UserError(f'--out is {str(out)!r}, and there are no parameter tokens here; leave it out')
  texts = _read_text(model, text, length, corpus_tokens)
  print(f'{source}, step {model.meta.step}: {model.definition.counts}')
  content = {
    'source': source,
    'step': model.meta.step,
    'model': config_lib.to_json(model.meta.config.model),
    **(_show_tokens(model, layers, texts, top_k, out) if has_tokens else {}),
    'experts': _show_experts(model, layers, texts, top_k),
  }
  if json:
    outputs.write_json('json', json, content)
    messages.say(f'wrote {json}')


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main)


def _show_tokens(
  model: Trained, layers: Sequence[int], texts: Texts, top_k: int, out: Path | None
) -> Row:
  """Print and draw the parameter tokens, and return the content of the JSON file about them."""
  from tokenformer_jax.inspection import heat_map, report
  from tokenformer_jax.inspection.model import maps, measure, old_tokens

  old = old_tokens(model)
  labels = report.labels(model.tokenizer, texts.shown.tolist())
  weights = {layer: one for layer, one in maps(model, texts.shown, layers).items() if one}
  if out:
    outputs.write_file('out', out, heat_map.draw(weights, labels, old).savefig)
    messages.say(f'wrote {out}')
  strongest = report.strongest_rows(weights, top_k)
  print(f'\nthe first {len(texts.shown)} tokens of {texts.name}\n')
  print(report.strongest_table(strongest, labels), flush=True)
  used = measure(model, texts.corpus)
  used = {layer: used[layer] for layer in layers if layer in used}
  counted = report.usage_rows(used)
  print(f'\nusage on {len(texts.corpus):,} tokens of {texts.corpus_name}\n')
  print(report.table(counted, report.USAGE))
  growth = None
  if old is not None and (aged := report.age_rows(used, old)):
    last = model.meta.lineage[-1]
    growth = {'action': last.action, 'source': last.source, 'step': last.step, 'layers': aged}
    print(f'\nold and new tokens: {last.action} at step {last.step} of {last.source}\n')
    print(report.table(aged, report.AGE))
  print(f'\n{report.DEFINITIONS}')
  return {
    'text': {'name': texts.name, 'ids': texts.shown.tolist(), 'labels': labels},
    'strongest': strongest,
    'usage': {'text': texts.corpus_name, 'positions': len(texts.corpus), 'layers': counted},
    'growth': growth,
    'tokens': report.token_rows(used),
    'definitions': report.DEFINITIONS,
  }


def _show_experts(model: Trained, layers: Sequence[int], texts: Texts, top_k: int) -> Row | None:
  """Print the experts' load and tokens; return them for the JSON file, or None without experts."""
  from tokenformer_jax.inspection import report
  from tokenformer_jax.inspection.model import answers

  chosen = answers(model, texts.corpus)
  chosen = {layer: chosen[layer] for layer in layers if layer in chosen}
  if not chosen:
    return None
  load = report.expert_rows(chosen)
  answered = report.answer_rows(chosen, model.tokenizer, top_k)
  print(f'\nexperts on {len(texts.corpus):,} tokens of {texts.corpus_name}\n')
  print(report.table(load, report.LOAD))
  print(f'\nthe busiest experts of each layer and the tokens that they get most, at most {top_k}\n')
  print(report.answer_table(answered, top_k))
  print(f'\n{report.EXPERT_DEFINITIONS}')
  return {
    'text': texts.corpus_name,
    'positions': len(texts.corpus),
    'layers': load,
    'answers': answered,
    'definitions': report.EXPERT_DEFINITIONS,
  }


def _read_text(model: Trained, text: str, length: int, corpus_tokens: int) -> Texts:
  """Return the first tokens of a text, or of the files or the held-out text to measure on."""
  import numpy as np

  from tokenformer_jax.data import held_out
  from tokenformer_jax.data.sources import open_source

  config, tokenizer = model.meta.config, model.tokenizer
  assert isinstance(config.data, TextConfig)
  if text.startswith(_FILES):
    opened = open_source(text, config.data.text_field, '--text')
    documents = opened.parted(config.data.document_separator).documents()
    corpus, corpus_name = held_out.first_tokens(documents, tokenizer, corpus_tokens), text
  else:
    corpus, corpus_name = held_out.held_out_tokens(config.data, tokenizer, corpus_tokens)
  if not len(corpus):
    raise UserError(f'there is no text in {corpus_name}')
  ids, name = corpus, corpus_name
  if text and not text.startswith(_FILES):
    ids, name = tokenizer.encode(text), 'the text given'
  ids = tokenizer.start(ids).astype(np.int32)
  if config.model.position_embedding == 'learned':
    length = min(length, config.model.max_length)
  return Texts(ids[:length], name, corpus, corpus_name)
