"""Write texts with a trained language model and its decoder."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding.decode import Decoder
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
  trained: int  # the tokens of the longest text of training

  @classmethod
  def from_trained(cls, model: Trained) -> 'Writer':
    """Prepare a model for writing. The writer does not use the model's own parameters."""
    decoder = Decoder(model.config.model, model.execution)
    with jax.set_mesh(model.mesh):
      params = decoder.prepare(model.params)
    return cls(decoder, params, model.tokenizer, model.mesh, model.config.data.sequence_length)

  def write(self, requests: Sequence[TextRequest], batch_size: int = 8) -> list[tuple[str, int]]:
    """Return the text after each prompt, and its number of tokens."""
    asked = [request.tokens(self.tokenizer, self.trained) for request in requests]
    with jax.set_mesh(self.mesh):
      written = self.decoder(self.params, asked, batch_size=batch_size)
    return [
      (decode_text(self.tokenizer, ids.tolist(), request.stop, one.prompt), len(ids))
      for request, one, ids in zip(requests, asked, written, strict=True)
    ]

  def stream(self, request: TextRequest, drawn: Callable[[], None]) -> Iterator[str]:
    """Yield one text in pieces as its tokens are drawn, and call `drawn` for each token.

    Call inside `jax.set_mesh(self.mesh)`.
    """
    asked = request.tokens(self.tokenizer, self.trained)

    def ids() -> Iterator[int]:
      for token in self.decoder.stream(self.params, asked):
        drawn()
        yield token

    return until(stream_text(self.tokenizer, ids(), asked.prompt), request.stop)
