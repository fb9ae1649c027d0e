"""Train language models on text."""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.data import marks, order, tokenizers
from tokenformer_jax.data.held_out import held_out_tokens
from tokenformer_jax.data.mixture import Mixture, open_sources
from tokenformer_jax.decoding.decode import Decoder
from tokenformer_jax.decoding.sampling import Sampling
from tokenformer_jax.decoding.texts import TextRequest, decode_text
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Aux, Context, Counts, LayerInputs
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.loss import LossSums, loss_sums, objective
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.runs.metrics import perplexity
from tokenformer_jax.tasks.task import (
  EvalSums,
  Figures,
  Task,
  check_enough,
  layer_keys,
  with_aux,
)

_LONGEST_COMPARED = 64  # the most tokens of a sequence for comparing two models


class TextTask(Task):
  """The prediction of the next token.

  Batches are int32 [B, T + 1]; −1 marks ignored targets, and ids may be marked: see `data.marks`.
  In a row without marks of beginnings each `_boundary` begins a document.
  """

  _data: Mixture  # set by `prepare`
  # Set by `prepare` as well: a plan compiles the same program with any id.
  _boundary = 0

  def abstract_batch(self) -> jax.ShapeDtypeStruct:
    data = self.config.data
    return jax.ShapeDtypeStruct((data.batch_size, data.sequence_length + 1), jnp.int32)

  def loss(
    self,
    params: Params,
    batch: jax.Array,
    key: jax.Array,
    *teacher: Params,
    counts: Counts | None = None,
  ) -> tuple[jax.Array, Figures]:
    counts = counts or self.counts(batch)
    f = functools.partial(objective, z_loss=self.config.optim.z_loss)
    (total, sums), aux = self._apply_to_targets(f, params, batch, key)
    targets = jnp.maximum(counts.targets, 1)  # A batch of chat may have no answer at all.
    total, figures = with_aux(total / targets, sums.nats / targets, aux, counts)
    return total, figures | self.learned_figures(sums.tokens)

  def learned_figures(self, tokens: jax.Array) -> Figures:
    """Return the share of the targets of a batch that carry loss, if there are conversations."""
    data = self.config.data
    total = data.batch_size * data.sequence_length
    return {'learned_share': tokens / total} if data.has_chat else {}

  def counts(self, batch: jax.Array) -> Counts:
    ids_BxT, targets_BxT = self.inputs_and_targets(batch)
    tokens_B = jnp.sum(ids_BxT >= 0, axis=1)
    return Counts(jnp.sum(targets_BxT >= 0), jnp.sum(tokens_B), jnp.sum(tokens_B > 0))

  def inputs_and_targets(self, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids [B, T] of a batch, and its targets [B, T]; −1 has no loss.

    The ids keep the marks of beginnings of documents: see `model_inputs`.
    """
    ids, targets = batch, batch
    if self.config.data.has_chat:
      ids = jnp.where(batch < order.NO_TOKEN, marks.flip(batch), batch)
      targets = jnp.maximum(batch, order.NO_TOKEN)
    if self.config.data.documents != 'joined':
      targets = marks.ids_alone(targets)
    ids_BxT, targets_BxT = (
      sharding.constrain(x, 'batch', 'slots') for x in (ids[:, :-1], targets[:, 1:])
    )
    return ids_BxT, targets_BxT

  def sums(self, params: Params, batch: jax.Array, *teacher: Params) -> EvalSums:
    del teacher
    sums, aux = self._apply_to_targets(loss_sums, params, batch)
    return EvalSums(sums, aux, self.counts(batch))

  def _apply_to_targets(
    self, f: Callable[..., Any], params: Params, batch: jax.Array, key: jax.Array | None = None
  ) -> tuple[Any, Aux]:
    """Return `f` of the last hidden states and the targets; for `key` see `hidden`."""
    model = self.definition.bind(params)
    ids_BxT, targets_BxT = self.inputs_and_targets(batch)
    hidden_BxTxD, aux = self.hidden(model, ids_BxT, key)
    how = {'chunk': self.config.train.loss_chunk, 'cap': model.logit_cap}
    return f(hidden_BxTxD, model.output_embedding, targets_BxT, **how), aux

  def hidden(self, model: LM, ids_BxT: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Aux]:
    """Return the input of the head [B, T, D], and the `Aux` of the layers.

    The id −1 is padding at the end of a row. `key` is that of a training step; None: an evaluation.
    """
    inputs = LayerInputs(key=layer_keys(self.config.model, key))
    ids_BxT, context = self.model_inputs(ids_BxT, training=key is not None)
    hidden_BxTxD, _, aux = model.hidden(ids_BxT, context, inputs=inputs)
    return hidden_BxTxD, aux

  def model_inputs(
    self, ids_BxT: jax.Array, *, training: bool = False
  ) -> tuple[jax.Array, Context]:
    """Return the ids and the context of rows, whose documents `data.documents` may separate."""
    documents, begins_BxT = self.config.data.documents, None
    if documents != 'joined':
      begins_BxT = marks.begins(ids_BxT, self._boundary)
      ids_BxT = marks.ids_alone(ids_BxT)
    context = Context.from_ids(ids_BxT, begins_BxT, documents, training=training)
    return jnp.maximum(ids_BxT, 0), context

  def logits(self, params: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    ids_BxT = batch[:, :-1]
    model, context = self.definition.bind(params), Context.from_ids(ids_BxT)
    return model(jnp.maximum(ids_BxT, 0), context)[0], batch[:, 1:]

  def prepare(self) -> None:
    """Open the token store; the first process builds it, then processes on other disks do."""
    data: Any = self.config.data  # its section for text
    vocabulary, tokenizer = self._trained_vocabulary, self._trained_tokenizer
    if vocabulary is not None and tokenizer is None:
      tokenizer = tokenizers.from_json(vocabulary)
    made = hosts.first_then_others(lambda: open_sources(data, self.config.train.seed, tokenizer))
    hosts.check_same(
      [int(made.digests[0][:7], 16)],
      'the hosts read different text; config.data must find the same',
    )
    self._data, self._boundary = made, made.tokenizer.boundary

  @property
  def examples(self) -> int:
    return self._data.examples

  @property
  def digests(self) -> tuple[str, ...]:
    return self._data.digests

  def at_stage(self, data: Any) -> Self:
    stage = super().at_stage(data)
    stage._data = self._data.at_stage(data)
    return stage

  def train_batches(
    self,
    rows: Sequence[int],
    first_step: int,
    last_step: int,
    position: order.Position = order.BEGINNING,
  ) -> Generator[np.ndarray, None, None]:
    return self._data.train_batches(rows, first_step, last_step, position)

  def validation_parts(self, rows: Sequence[int]) -> dict[str, Iterator[np.ndarray]]:
    return self._data.validation_parts(rows, self.config.train.eval_batches)

  def held_out(
    self, vocabulary: dict[str, Any], count: int, first: int = 0, *, repeat: bool = True
  ) -> tuple[np.ndarray, str]:
    """Return rows of the run's token store if it exists, or of the Python standard library.

    No store is built.
    """
    length = min(self.config.data.sequence_length, _LONGEST_COMPARED) + 1
    needed = (first + count) * length

    data: Any = self.config.data
    tokens, name = held_out_tokens(data, tokenizers.from_json(vocabulary), needed)
    if not repeat:
      check_enough(count, first, len(tokens) // length, f'rows of {length} tokens')
    rows = np.resize(tokens, needed).reshape(-1, length)[first:]
    return rows, f'{count} × {length - 1} tokens of {name}'

  def vocabulary(self) -> dict[str, Any]:
    chat, known = self._data.chat, self._trained_vocabulary or {}
    return known | self._data.tokenizer.to_json() | ({'chat': chat} if chat else {})

  def describe_data(self) -> str:
    return self._data.describe()

  def train_figures(self, loss: float) -> dict[str, float]:
    figures = {'train/perplexity': perplexity(loss)}
    # With weights by step no number of bytes belongs to the tokens of all steps.
    if len(self._data.shares.steps) == 1:
      figures['train/bits_per_byte'] = self._bits_per_byte(loss, 'train')
    return figures

  def data_figures(self, step: int, position: order.Position) -> dict[str, float]:
    return self._data.figures(step, position)

  def parts_figures(self, sums: Mapping[str, EvalSums]) -> dict[str, float]:
    """Return the figures of each source of a mixture, and their means by its last weights."""
    if set(sums) == {''}:
      return self.eval_figures(sums[''])
    sources = {name: self.eval_figures(one, name) for name, one in sums.items()}
    weights = self._data.shares.last
    whole = {
      figure: sum(weights[name] * figures[figure] for name, figures in sources.items())
      for figure in next(iter(sources.values()))
    }
    whole['perplexity'] = perplexity(whole['loss'])
    whole['bits_per_byte'] = self._bits_per_byte(whole['loss'], 'validation')
    shown = ('loss', 'perplexity', 'bits_per_byte', 'accuracy')
    return whole | {
      f'{name}/{key}': figures[key] for name, figures in sources.items() for key in shown
    }

  def eval_figures(self, sums: EvalSums, source: str = '') -> dict[str, float]:
    """Return the figures of an evaluation on a source, or on the only text."""
    own: LossSums = sums.task
    loss: Any = own.nats / own.tokens
    return {
      'loss': loss,
      'perplexity': perplexity(loss),
      'bits_per_byte': self._bits_per_byte(loss, 'validation', source),
      'accuracy': float(own.correct / own.tokens),
      **sums.layer_figures(),
    }

  def sample(self, params: Params) -> str:
    """Return the model's continuation of `config.train.sample_prompt`."""
    train, model, tokenizer = self.config.train, self.config.model, self._data.tokenizer
    if not train.sample_tokens:
      return ''

    request = TextRequest(
      train.sample_prompt, train.sample_tokens, Sampling(seed=train.seed)
    ).tokens(tokenizer)
    if model.position_embedding == 'learned':
      room = model.max_length - len(request.prompt)
      if room < 1:
        return f'none: train.sample_prompt is as long as the {model.max_length} learned positions'
      request = dataclasses.replace(request, length=min(request.length, room))
    (ids,) = self._decoder(self._decoder.prepare(params), [request])
    return train.sample_prompt + decode_text(tokenizer, ids.tolist(), prompt=request.prompt)

  @functools.cached_property
  def _decoder(self) -> Decoder:
    return Decoder(self.config.model, Execution.from_config(self.config))

  def _bits_per_byte(self, loss: float, split: str, source: str = '') -> float:
    return loss / math.log(2) / self._data.bytes_per_token(split, source)
