r"""Shows what the parameter tokens of a trained model answer to, and which of them are used.

  python -m tokenformer_jax.inspect --source=runs/lm_stdlib --text='def main(' --out=heat.png

The weights of a Pattention are an attention map of the tokens of a text over parameter tokens. For
the text, this prints the parameter tokens with the largest weights and the input tokens that they
have them for, and draws the maps. On more text it counts how many parameter tokens are in use, and
for a model that has grown sets the new ones against the old ones.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from tokenformer_jax import checkpoint, cli, sharding, start
from tokenformer_jax.config import MeshConfig
from tokenformer_jax.data import text, tokenizers
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import last_growth, verify
from tokenformer_jax.inspect import picture, report, usage
from tokenformer_jax.inspect.weights import KINDS, compiled_maps, of_kind
from tokenformer_jax.lm import Compute, define_lm
from tokenformer_jax.params import Definition, Params


@dataclasses.dataclass(frozen=True)
class Model:
  """A model to look into, and where it came from."""

  source: str
  meta: checkpoint.Meta
  definition: Definition
  params: Params
  mesh: Mesh

  @property
  def tokenizer(self) -> tokenizers.Tokenizer:
    return tokenizers.from_json(self.meta.tokenizer)

  @property
  def old(self) -> dict[str, int] | None:
    """How many parameter tokens of each kind the last growth found, or None if it added none."""
    model = self.meta.config.model
    growth = last_growth(self.meta.lineage, model)
    if growth is None:
      return None
    counts = {kind: of_kind(growth.old_tokens['blocks'], kind)['keys'] for kind in KINDS}
    now = {kind: of_kind(self.params['blocks'], kind)['keys'].shape[1] for kind in KINDS}
    return None if counts == now else counts


def define_flags() -> None:
  """Defines the command's flags."""
  flags.DEFINE_string('source', None, 'A run: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string(
    'text', '', "A text, or files:GLOB for that of files; empty: the run's held-out text."
  )
  flags.DEFINE_integer('length', 64, 'So many tokens of the text are shown.', lower_bound=1)
  flags.DEFINE_integer(
    'corpus_tokens',
    32768,
    "Usage is measured on so many tokens: of the files of --text, else of the run's held-out text.",
    lower_bound=1,
  )
  flags.DEFINE_string('layer', 'all', 'The index of a layer, the first is 0; or all.')
  flags.DEFINE_list('kinds', list(KINDS), 'Which Pattentions of a layer.')
  flags.DEFINE_integer(
    'top_k', 5, 'Parameter tokens of each Pattention, and input tokens of each.', lower_bound=1
  )
  flags.DEFINE_string('out', None, 'The heat map to write: .png, .pdf or .svg.')
  flags.DEFINE_string('json', None, 'A file to write everything to, with figures for every token.')


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  del argv
  values = flags.FLAGS
  for kind in values.kinds:
    if kind not in KINDS:
      raise UserError(f'--kinds names {kind!r}{nearest(kind, KINDS)}')
  if values.out and Path(values.out).suffix not in picture.SUFFIXES:
    raise UserError(f'--out={values.out} must end in one of {", ".join(picture.SUFFIXES)}')
  model = load(values.source)
  layers = _layers(values.layer, model.meta.config.model.layers)
  shown, name, corpus, corpus_name = _read_text(model)
  found = _look(model, shown, layers, values.kinds, values.top_k)
  names = report.labels(model.tokenizer, shown.tolist())
  if values.out:  # Before the rest, which takes longer: a missing library is told at once.
    figure = picture.draw(found['maps'], names, model.old)
    _write(values.out, '--out', lambda path: figure.savefig(path))
  print(f'{values.source}, step {model.meta.step}: {len(shown)} tokens of {name}\n')
  print(report.strongest_table(found['strongest'], names), flush=True)
  used = measure(model, corpus)
  used = {kind: used[kind] for kind in values.kinds}
  counted = report.usage_rows(used, layers)
  print(f'\nusage on {len(corpus):,} tokens of {corpus_name}\n')
  print(report.usage_table(counted))
  aged = [] if model.old is None else report.age_rows(used, model.old, layers)
  if aged:
    last = model.meta.lineage[-1]
    print(f'\nold and new tokens: {last.action} at step {last.step} of {last.source}\n')
    print(report.age_table(aged))
  print(f'\n{report.DEFINITIONS}')
  if values.json:
    content = {
      'source': values.source,
      'step': model.meta.step,
      'model': dataclasses.asdict(model.meta.config.model),
      'text': {'name': name, 'ids': shown.tolist(), 'labels': names},
      'strongest': found['strongest'],
      'usage': {'text': corpus_name, 'positions': len(corpus), 'layers': counted},
      'growth': aged,
      'tokens': report.token_rows(used, layers),
      'definitions': report.DEFINITIONS,
    }
    written = json.dumps(content, ensure_ascii=False) + '\n'
    _write(values.json, '--json', lambda path: Path(path).write_text(written, 'utf-8'))


def load(source: str) -> Model:
  """Reads a model of parameter tokens, over all devices, in the dtype of its run.

  Args:
    source: DIR or DIR@STEP.

  Raises:
    UserError: that is no run, it is damaged, or the model has no parameter tokens.
  """
  directory, step = cli.split_source(source)
  mesh = sharding.make_mesh(MeshConfig(), start.devices())
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
    if meta.config.model.projection != 'pattention':
      raise UserError(
        f'{directory} is a Transformer (model.projection=dense): it has no parameter tokens to '
        'look into'
      )
    definition = define_lm(meta.config.model, Compute.of(meta.config))
    shardings = sharding.of_axes(mesh, definition.axes)
    abstract = {'params': sharding.with_even_shardings(definition.abstract, shardings)}
    params = checkpoint.restore_source(checkpoints, meta, abstract)['params']
  return Model(source, meta, definition, params, mesh)


def maps(model: Model, ids: np.ndarray, layer: int) -> dict[str, np.ndarray]:
  """The weights of one layer for a text of ids [T], by kind: float32 [T, N]."""
  run = compiled_maps(model.definition, model.mesh)
  with jax.set_mesh(model.mesh):
    (batch,) = usage.batches(np.asarray(ids)[None], 1, model.mesh)
    return jax.tree.map(np.asarray, run(model.params, batch, layer))


def measure(model: Model, ids: np.ndarray) -> dict[str, usage.Usage]:
  """The usage on a corpus of ids [P], cut into sequences as long as those of training."""
  config = model.meta.config
  rows = usage.as_rows(ids, config.data.sequence_length)
  return usage.measure(model.definition, config.model, model.params, rows, model.mesh)


def _look(
  model: Model, ids: np.ndarray, layers: Sequence[int], kinds: Sequence[str], top_k: int
) -> dict[str, Any]:
  """The maps of some layers and kinds, and what `report.strongest` finds in them."""
  found: dict[str, Any] = {'maps': {}, 'strongest': []}
  for layer in layers:
    of_layer = maps(model, ids, layer)
    found['maps'][layer] = {kind: of_layer[kind] for kind in kinds}
    for kind in kinds:
      rows = report.strongest(of_layer[kind], top_k)
      found['strongest'] += [{'layer': layer, 'kind': kind, **row} for row in rows]
  return found


def _read_text(model: Model) -> tuple[np.ndarray, str, np.ndarray, str]:
  """The ids to show and the name of their text, and those to measure usage on and theirs."""
  values, config, tokenizer = flags.FLAGS, model.meta.config, model.tokenizer
  if values.text.startswith('files:'):
    try:
      documents = text.open_source(values.text, config.data.text_field).documents()
      corpus = verify.first_tokens(documents, tokenizer, values.corpus_tokens)
    except UserError as error:
      raise UserError(str(error).replace('config.data.source', '--text')) from error
    corpus_name = values.text
  else:
    corpus, corpus_name = verify.held_out_tokens(config, tokenizer, values.corpus_tokens)
  if not len(corpus):
    raise UserError(f'there is no text in {corpus_name}')
  as_given = values.text and not values.text.startswith('files:')
  ids = tokenizer.encode(values.text) if as_given else corpus
  name = 'the text given' if as_given else corpus_name
  # As at the start of a document, which is what the model saw in training.
  ids = np.append(tokenizer.end_of_document, ids).astype(np.int32)
  length = values.length
  if config.model.positions == 'learned':
    length = min(length, config.model.max_length)
  return ids[:length], name, corpus, corpus_name


def _layers(asked: str, layers: int) -> list[int]:
  if asked == 'all':
    return list(range(layers))
  if not asked.isdigit() or int(asked) >= layers:
    raise UserError(f'--layer is {asked!r}; this model has the layers 0 to {layers - 1}, or all')
  return [int(asked)]


def _write(path: str, flag: str, write: Any) -> None:
  try:
    write(path)
  except OSError as error:
    raise UserError(f'{flag}={path} cannot be written: {error.strerror}') from error
  cli.say(f'wrote {path}')
