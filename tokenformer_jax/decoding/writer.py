"""Write texts with a trained language model and its decoder."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.config import Config
from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding.decode import Decoder, Request
from tokenformer_jax.decoding.length import say_length
from tokenformer_jax.decoding.texts import TextRequest, decode_text, stream_text, until
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.model.params import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
  """A language model that is ready to write texts; it keeps its compiled programs."""

  decoder: Decoder
  params: Params  # in the decoder's form, on the mesh
  tokenizer: tokenizers.Tokenizer
  mesh: Mesh
  config: Config  # of the run

  @classmethod
  def from_trained(cls, model: Trained) -> 'Writer':
    """Prepare a model for writing. The writer does not use the model's own parameters."""
    decoder = Decoder(model.config.model, model.execution)
    with jax.set_mesh(model.mesh):
      params = decoder.prepare(model.params)
    return cls(decoder, params, model.tokenizer, model.mesh, model.config)

  def write(self, requests: Sequence[TextRequest], batch_size: int = 8) -> list[tuple[str, int]]:
    """Return the text after each prompt, and its number of tokens."""
    asked = self._tokens(requests)
    with jax.set_mesh(self.mesh):
      written = self.decoder(self.params, asked, batch_size=batch_size)
    return [
      (decode_text(self.tokenizer, ids.tolist(), request.stop, one.prompt), len(ids))
      for request, one, ids in zip(requests, asked, written, strict=True)
    ]

  def _tokens(self, requests: Sequence[TextRequest]) -> list[Request]:
    """Return requests in tokens, and warn if the longest may be too long for the model."""
    trained = self.config.data.sequence_length
    asked = [request.tokens(self.tokenizer, trained) for request in requests]
    lengths = [len(one.prompt) + one.length for one in asked]
    if lengths:
      number = f'text {1 + int(np.argmax(lengths))} of {len(lengths)}'
      say_length(self.config, max(lengths), number if len(lengths) > 1 else 'the text')
    return asked

  def stream(self, request: TextRequest, drawn: Callable[[], None]) -> Iterator[str]:
    """Yield one text in pieces as its tokens are drawn, and call `drawn` for each token.

    Call inside `jax.set_mesh(self.mesh)`.
    """
    (asked,) = self._tokens([request])

    def ids() -> Iterator[int]:
      for token in self.decoder.stream(self.params, asked):
        drawn()
        yield token

    return until(stream_text(self.tokenizer, ids(), asked.prompt), request.stop)
