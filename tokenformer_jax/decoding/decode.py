"""Generate text token by token, for batches of prompts of unequal lengths, with layer caches.

Rows are padded on the left, so that they end in the same slot and the new tokens of all rows go to
the same slot of the caches. Shapes are static: the lengths of prompts and of whole texts are
rounded up to a few sizes (`buckets.bucket`), those of chats to fewer. Two programs compile for each
size: one reads the prompts, the other writes several tokens in a row without the host.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.decoding import buckets, sampling
from tokenformer_jax.decoding.sampling import Draws, Sampling
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.joined import join, joined_lm
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import LM, Execution, define_lm, unstack
from tokenformer_jax.model.loss import logits
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role, define_model
from tokenformer_jax.parallel.sharding import constrain, platform

_CHUNK = 16  # tokens that one call writes before the host reads them
STREAM_CHUNK = 4  # the same for a streamed text, whose reader waits
NO_TOKEN = -1  # the id after the end of a row
# Arrays that the model rounds to the dtype of its products wherever it uses them.
_ROUNDED = (
  Role.KEY,
  Role.VALUE,
  Role.EMBEDDING,
  Role.TIED_EMBEDDING,
  Role.HEAD,
  Role.POSITION,
  Role.KERNEL,
)


@dataclasses.dataclass(frozen=True)
class Request:
  """A request for a text of at most `length` tokens after a prompt, token ids [T ≥ 1].

  `ended` returns whether the written tokens are enough. The host calls it once per chunk, so a text
  may be a few tokens longer than necessary.
  """

  prompt: Sequence[int]
  length: int
  sampling: Sampling = sampling.DEFAULT
  stop: tuple[int, ...] = ()  # ids that end the text, which includes the id that ends it
  ended: Callable[[list[int]], bool] | None = None
  grows: bool = False  # whether a later prompt begins with this one and its text


class _State(NamedTuple):
  """The state between two chunks."""

  caches: tuple[Any, ...]  # one for each layer
  logits_BxV: jax.Array
  slot: jax.Array  # the slot of the next token
  left_B: jax.Array  # tokens that each row may still write

  def placed(self, module: LM) -> '_State':
    """Return the state in the partition that every chunk starts with, so it compiles once."""
    return _State(
      caches=module.shard_caches(self.caches),
      logits_BxV=constrain(self.logits_BxV, 'batch', 'vocab'),
      slot=constrain(self.slot),
      left_B=constrain(self.left_B, None),
    )


class _Rows(NamedTuple):
  """The constants of a batch."""

  padding_B: Any  # int32
  draws: Draws
  stop_BxK: np.ndarray


class Decoder:
  """A writer of texts with one model; it keeps its compiled programs."""

  def __init__(self, model: ModelConfig, execution: Execution):
    """Define the model, with its layers in a list."""
    self._model = model
    execution = dataclasses.replace(execution, layers='list')
    self._stored = define_lm(model, execution)
    self._joined = define_model(joined_lm, model, execution)

    @jax.jit
    def prepare(params: Params) -> Params:
      def placed(info: ParamInfo, array: jax.Array) -> jax.Array:
        # Others, such as routers and norms, compute in float32.
        rounded = array.astype(execution.dtype) if info.role in _ROUNDED else array
        return constrain(rounded, *info.axes)

      params = unstack(params, model)
      if self.definition is self._joined:
        params = nnx.to_pure_dict(nnx.state(join(self._stored.bind(params)), nnx.Param))
      return jax.tree.map(placed, self.definition.info, params)

    @functools.partial(jax.jit, static_argnames='space')
    def prefill(params: Params, ids_BxT: jax.Array, rows: _Rows, left_B: jax.Array, space: int):
      module = self.definition.bind(params)
      caches = module.init_caches(ids_BxT.shape[0], space)
      hidden_BxTxD, caches, _ = module.hidden(ids_BxT, Context(0, rows.padding_B), caches)
      last_Bx1xD = hidden_BxTxD[:, -1:]
      last_BxV = logits(last_Bx1xD, module.output_embedding, module.logit_cap)[:, 0]
      return _State(caches, last_BxV, jnp.int32(ids_BxT.shape[1]), left_B).placed(module)

    @functools.partial(jax.jit, static_argnames=('need', 'chunk'), donate_argnames='state')
    def advance(params, state: _State, rows: _Rows, going_B: jax.Array, need: str, chunk: int):
      module = self.definition.bind(params)
      state = state._replace(left_B=jnp.where(going_B, state.left_B, 0))

      def step(carry: tuple[jax.Array, jax.Array, _State]) -> tuple[jax.Array, jax.Array, _State]:
        i, written_CxB, (caches, logits_BxV, slot, left_B) = carry
        position_B = slot - rows.padding_B
        ids_B = sampling.draw(logits_BxV, rows.draws, position_B, need=need)
        written_CxB = written_CxB.at[i].set(jnp.where(left_B > 0, ids_B, NO_TOKEN))
        stops_B = jnp.any(ids_B[:, None] == rows.stop_BxK, axis=-1)
        left_B = jnp.where(stops_B, 0, jnp.maximum(left_B - 1, 0))
        logits_Bx1xV, caches = module(ids_B[:, None], Context(slot, rows.padding_B), caches)
        return i + 1, written_CxB, _State(caches, logits_Bx1xV[:, 0], slot + 1, left_B)

      def goes_on(carry: tuple[jax.Array, jax.Array, _State]) -> jax.Array:
        i, _, state = carry
        return (i < chunk) & jnp.any(state.left_B > 0)

      empty = jnp.full((chunk, rows.padding_B.shape[0]), NO_TOKEN)
      first = jnp.int32(0), empty, state
      if platform() == 'cpu':
        _, written_CxB, state = jax.lax.while_loop(goes_on, step, first)
      else:  # A condition on data costs kernels, and a copy to the host, for every token.
        _, written_CxB, state = jax.lax.fori_loop(0, chunk, lambda _, carry: step(carry), first)
      # Every host reads all rows, so that all stop at the same token.
      return constrain(written_CxB, None, None), state.placed(module)

    self._prepare, self._prefill, self._advance = prepare, prefill, advance

  def prepare(self, params: Params) -> Params:
    """Return a model's parameters in the form that the other methods take, those of `definition`.

    Every layer has its own arrays, those of products in the dtype of the products, so writing a
    token copies no parameters. The results of the model do not change.
    """
    return self._prepare(params)

  @property
  def definition(self) -> Definition:
    """The model with prepared parameters, on the current mesh.

    On one accelerator it has few operations (`model/joined.py`). CPUs, whose time is that of bytes,
    and devices that split parameters compute each projection on its own.
    """
    is_whole = jax.sharding.get_abstract_mesh().size <= 1
    return self._joined if is_whole and platform() != 'cpu' else self._stored

  def __call__(
    self, params: Params, requests: Sequence[Request], *, batch_size: int = 8
  ) -> list[np.ndarray]:
    """Return the token ids that follow each prompt, in the order of the requests.

    A text depends only on its own request, not on the other requests of its batch. The parameters
    come from `prepare`, the requests are the same on every host, and `batch_size` is rounded up to
    a number of rows that the mesh can split.
    """
    texts: list[np.ndarray] = [np.array([], np.int32)] * len(requests)
    lengths = [len(request.prompt) + request.length for request in requests]
    for indices in buckets.batches(lengths, buckets.rows(batch_size)):
      empty = np.empty((0, len(indices)), np.int32)
      chunks = self.chunks(params, [requests[i] for i in indices])
      for i, written in zip(indices, np.concatenate([empty, *chunks]).T, strict=True):
        texts[i] = written[written != NO_TOKEN]
    return texts

  def chunks(
    self, params: Params, requests: Sequence[Request], *, chunk: int = _CHUNK
  ) -> Iterator[np.ndarray]:
    """Yield the tokens [C, B] of one batch, C ≤ `chunk` at a time; NO_TOKEN after a row's end."""
    self._check_positions(requests)
    count = len(requests)
    # Copies of the first request with nothing to write fill the batch.
    filled = [*requests, *[requests[0]] * (buckets.rows(count) - count)]
    left_B = np.array([r.length if i < count else 0 for i, r in enumerate(filled)], np.int32)
    padded, longest = max(len(r.prompt) for r in filled), int(left_B.max())
    if filled[0].grows:  # Sizes that hold for several turns, which so compile once.
      padded, room = buckets.growing_bucket(padded), buckets.growing_bucket(longest)
    else:
      padded, room = buckets.bucket(padded), longest
    rows = _Rows(
      padding_B=np.array([padded - len(r.prompt) for r in filled], np.int32),
      draws=Draws.from_samplings([r.sampling for r in filled]),
      stop_BxK=_stops(filled),
    )
    ids_BxT = np.zeros((len(filled), padded), np.int32)
    for row, request in zip(ids_BxT, filled, strict=True):
      row[padded - len(request.prompt) :] = request.prompt
    state = self._prefill(params, ids_BxT, rows, left_B, space=buckets.bucket(padded + room))
    need = sampling.needs([r.sampling for r in requests])
    going_B = np.ones(len(filled), bool)
    texts: list[list[int]] = [[] for _ in requests]
    for _ in range(0, longest, chunk):
      written_CxB, state = self._advance(params, state, rows, going_B, need=need, chunk=chunk)
      written_CxB = np.asarray(written_CxB.addressable_data(0))[:, :count]
      yield written_CxB
      for i, (text, new) in enumerate(zip(texts, written_CxB.T, strict=True)):
        text.extend(new[new != NO_TOKEN].tolist())
        ended = requests[i].ended
        going_B[i] = new[-1] != NO_TOKEN and not (ended and ended(text))
      if not going_B[:count].any():
        return

  def stream(self, params: Params, request: Request) -> Iterator[int]:
    """Yield the token ids of one text soon after they are drawn."""
    for written_Cx1 in self.chunks(params, [request], chunk=STREAM_CHUNK):
      yield from (token for token in written_Cx1[:, 0].tolist() if token != NO_TOKEN)

  def _check_positions(self, requests: Sequence[Request]) -> None:
    total = max(len(request.prompt) + request.length for request in requests)
    if self._model.position_embedding == 'learned' and total > self._model.max_length:
      raise UserError(
        f'the prompt and the text to write are {total} tokens; this model has learned positions '
        f'for {self._model.max_length}; ask for fewer'
      )


def _stops(requests: Sequence[Request]) -> np.ndarray:
  """Return stop ids [B, K]; NO_TOKEN fills rows with fewer."""
  # K is rounded up to a multiple of 4, so that few programs compile.
  most = -(-max([1, *(len(request.stop) for request in requests)]) // 4) * 4
  stops = np.full((len(requests), most), NO_TOKEN, np.int32)
  for row, request in zip(stops, requests, strict=True):
    row[: len(request.stop)] = request.stop
  return stops
