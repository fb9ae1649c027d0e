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

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.cli import main as cli
from tokenformer_jax.data import held_out
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.inspection import heat_map, report
from tokenformer_jax.inspection.model import answers, load, maps, measure, old_tokens
from tokenformer_jax.inspection.report import Row
from tokenformer_jax.inspection.weights import names, pattentions
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths


class Texts(NamedTuple):
  """Token ids and the names of their texts."""

  shown: np.ndarray
  name: str
  corpus: np.ndarray  # to measure usage on
  corpus_name: str


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('source', None, 'A run: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string(
    'text', '', "A text, or files:GLOB for the text of files; empty: the run's held-out text."
  )
  flags.DEFINE_integer('length', 64, 'The number of tokens of the text to show.', lower_bound=1)
  flags.DEFINE_integer(
    'corpus_tokens',
    32768,
    "Tokens to measure usage on: from the files of --text, else from the run's held-out text.",
    lower_bound=1,
  )
  flags.DEFINE_string('layer', 'all', 'The number of a layer, the first is 0; or all.')
  flags.DEFINE_list('kinds', None, 'Pattentions of a layer, such as query,ffn; by default all.')
  flags.DEFINE_integer(
    'top_k', 5, 'Parameter tokens to list for each Pattention, and inputs of each.', lower_bound=1
  )
  flags.DEFINE_string('out', None, 'The heat map to write: .png, .pdf or .svg.')
  flags.DEFINE_string('json', None, 'A JSON file for the output, with figures for every token.')


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main)


def main(argv: Sequence[str]) -> None:
  """Print the tables, and write the heat map and the JSON file that the flags name."""
  del argv
  values = flags.FLAGS
  cli.output_file('out', paths.PICTURES)
  cli.output_file('json')
  if values.text.startswith('files:'):  # Report a wrong name before the model loads.
    open_source(values.text, 'text', '--text')
  if values.out:
    heat_map.check()
  model = load(values.source)
  chosen = _chosen_pattentions(model)
  content = {
    'source': values.source,
    'step': model.meta.step,
    'model': config_lib.to_json(model.meta.config.model),
  }
  texts = _read_text(model)
  print(f'{values.source}, step {model.meta.step}: {model.definition.counts}')
  if chosen:
    content |= _show_tokens(model, chosen, texts)
  content['experts'] = _show_experts(model, texts)
  if values.json:
    written = json.dumps(content, ensure_ascii=False) + '\n'
    _write('json', lambda path: path.write_text(written, 'utf-8'))


def _show_tokens(model: Trained, chosen: Mapping[int, Sequence[str]], texts: Texts) -> Row:
  """Print and draw the parameter tokens, and return the content of the JSON file about them."""
  values, old = flags.FLAGS, old_tokens(model)
  labels = report.labels(model.tokenizer, texts.shown.tolist())
  found = _only(chosen, maps(model, texts.shown, list(chosen)))
  if values.out:
    _write('out', heat_map.draw(found, labels, old).savefig)
  strongest = report.strongest_rows(found, values.top_k)
  print(f'\nthe first {len(texts.shown)} tokens of {texts.name}\n')
  print(report.strongest_table(strongest, labels), flush=True)
  used = _only(chosen, measure(model, texts.corpus))
  counted = report.usage_rows(used)
  print(f'\nusage on {len(texts.corpus):,} tokens of {texts.corpus_name}\n')
  print(report.usage_table(counted))
  growth = None
  if old is not None and (aged := report.age_rows(used, old)):
    last = model.meta.lineage[-1]
    growth = {'action': last.action, 'source': last.source, 'step': last.step, 'layers': aged}
    print(f'\nold and new tokens: {last.action} at step {last.step} of {last.source}\n')
    print(report.age_table(aged))
  print(f'\n{report.DEFINITIONS}')
  return {
    'text': {'name': texts.name, 'ids': texts.shown.tolist(), 'labels': labels},
    'strongest': strongest,
    'usage': {'text': texts.corpus_name, 'positions': len(texts.corpus), 'layers': counted},
    'growth': growth,
    'tokens': report.token_rows(used),
    'definitions': report.DEFINITIONS,
  }


def _show_experts(model: Trained, texts: Texts) -> Row | None:
  """Print the experts' load and tokens; return them for the JSON file, or None without experts."""
  top_k, layers = flags.FLAGS.top_k, _layers(flags.FLAGS.layer, model.config.model.depth)
  found = answers(model, texts.corpus)
  found = {layer: found[layer] for layer in layers if layer in found}
  if not found:
    return None
  load = report.expert_rows(found)
  answered = report.answer_rows(found, model.tokenizer, top_k)
  print(f'\nexperts on {len(texts.corpus):,} tokens of {texts.corpus_name}\n')
  print(report.expert_table(load))
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


def _read_text(model: Trained) -> Texts:
  """Return the texts that the flags name.

  Raises:
    UserError: a text does not exist, or is empty.
  """
  values, config, tokenizer = flags.FLAGS, model.meta.config, model.tokenizer
  if values.text.startswith('files:'):
    documents = open_source(values.text, config.data.text_field, '--text').documents()
    corpus = held_out.first_tokens(documents, tokenizer, values.corpus_tokens)
    corpus_name = values.text
  else:
    corpus, corpus_name = held_out.held_out_tokens(config.data, tokenizer, values.corpus_tokens)
  if not len(corpus):
    raise UserError(f'there is no text in {corpus_name}')
  as_given = values.text and not values.text.startswith('files:')
  ids = tokenizer.encode(values.text) if as_given else corpus
  name = 'the text given' if as_given else corpus_name
  ids = tokenizer.start(ids).astype(np.int32)
  length = values.length
  if config.model.position_embedding == 'learned':
    length = min(length, config.model.max_length)
  return Texts(ids[:length], name, corpus, corpus_name)


def _chosen_pattentions(model: Trained) -> dict[int, list[str]]:
  """Return the Pattentions that --layer and --kinds name, by layer; none in a Transformer.

  Raises:
    UserError: there is no such layer or Pattention, or the layer has none of them.
  """
  known = pattentions(model.definition)
  if not any(known):
    for flag in ('kinds', 'out'):
      if given := flags.FLAGS[flag].value:
        raise UserError(
          f'--{flag} is {given!r}, and this model has experts but no parameter tokens; leave it out'
        )
    return {}
  layers = _layers(flags.FLAGS.layer, len(known))
  kinds = _kinds(flags.FLAGS.kinds, names(model.definition))
  chosen = {layer: [kind for kind in kinds if kind in known[layer]] for layer in layers}
  if not any(chosen.values()):
    (layer,) = layers  # All layers together have every kind, so --layer names one.
    here = ', '.join(known[layer])
    raise UserError(
      f'layer {layer} has no parameter tokens of {", ".join(kinds)}; it has '
      f'{f"those of {here}" if here else "none at all"}, so take another --layer'
    )
  return {layer: kinds for layer, kinds in chosen.items() if kinds}


def _only(
  chosen: Mapping[int, Sequence[str]], found: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
  """Return the entries of `found` for the chosen layers and Pattentions."""
  return {layer: {kind: found[layer][kind] for kind in kinds} for layer, kinds in chosen.items()}


def _layers(asked: str, layers: int) -> list[int]:
  if asked == 'all':
    return list(range(layers))
  if asked not in map(str, range(layers)):
    raise UserError(f'--layer is {asked!r}; this model has the layers 0 to {layers - 1}, or all')
  return [int(asked)]


def _kinds(asked: list[str] | None, known: Sequence[str]) -> Sequence[str]:
  if asked is None:
    return known
  for kind in asked or ['']:
    if kind not in known:
      raise UserError(f'--kinds names {kind!r}{nearest(kind, known)}')
  return asked


def _write(flag: str, write: Callable[[Path], Any]) -> None:
  cli.write_output(flag, write)
  messages.say(f'wrote {flags.FLAGS[flag].value}')
