"""A trained language model that writes texts: the decoder, with its own form of the parameters."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from tokenformer_jax.data import tokenizers
from tokenformer_jax.decode import Decoder
from tokenformer_jax.params import Params
from tokenformer_jax.texts import TextRequest, complete
from tokenformer_jax.trained import Trained


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
  """Writes texts; programs that were compiled once are kept.

  Attributes:
    decoder: of the model.
    params: in the decoder's form, on the mesh.
    tokenizer: of the model.
    mesh: to compute on.
  """

  decoder: Decoder
  params: Params
  tokenizer: tokenizers.Tokenizer
  mesh: Mesh

  @classmethod
  def of(cls, model: Trained) -> 'Writer':
    """Prepare a model; its own parameters are not needed any more."""
    decoder = Decoder(model.config.model, model.compute)
    with jax.set_mesh(model.mesh):
      return cls(decoder, decoder.prepare(model.params), model.tokenizer, model.mesh)

  def write(self, requests: Sequence[TextRequest], batch_size: int = 8) -> list[tuple[str, int]]:
    """Return what follows each prompt, and of how many tokens it is.

    Args:
      requests: what to write.
      batch_size: texts at a time.

    Raises:
      UserError: the model has learned positions that do not reach so far.
    """
    with jax.set_mesh(self.mesh):
      written = complete(self.decoder, self.params, self.tokenizer, requests, batch_size=batch_size)
      return list(written)

  def stream(self, request: TextRequest) -> Iterator[int]:
    """Return the token ids of one text as they are drawn; for use in `jax.set_mesh(self.mesh)`."""
    return self.decoder.stream(self.params, request.tokens(self.tokenizer))
