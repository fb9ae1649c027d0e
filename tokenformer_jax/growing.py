"""Make larger and smaller runs from a run: the part of `Run` that grows."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tokenformer_jax.config import Config, configure
from tokenformer_jax.config.groups import parse_numbers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import actions, expert_actions
from tokenformer_jax.grow import experts as experts_lib
from tokenformer_jax.storage import paths

Path = str | os.PathLike[str]


class Growing:
  """The methods of `Run` that make another run with a larger or smaller model."""

  config: Config
  source: str

  def _open(self, target: Path) -> Self:
    """Return the run in a work directory."""
    raise NotImplementedError

  def grow(
    self,
    target: Path,
    param_tokens: Mapping[str, int] | None = None,
    *,
    layers: int | None = None,
    pattern: str | None = None,
    width: int | None = None,
    heads: int | None = None,
    ffn_width: int | None = None,
    experts: int | Mapping[str, int] | None = None,
    expert_tokens: int | None = None,
    top_k: int | None = None,
    **how: Any,
  ) -> Self:
    """Make a larger model in a new work directory; report what changes and whether it is exact.

      grown = run.grow('runs/grown', {'qkv': 128, 'proj': 128, 'ffn': 512})

    Args:
      target: the new work directory.
      param_tokens: new counts by projection, such as qkv, proj and ffn; others stay. With several
        kinds of layers, `local.ffn` is the count of one kind, and `ffn` that of all.
      layers: the new number of layers, all of the rows that there are.
      pattern: the new pattern of layers, where rows differ: 'local*10 full'.
      width: the new width of a Transformer, for example with method='net2net'.
      heads: the new number of heads of a Transformer.
      ffn_width: the new inner width of a Transformer's feed-forward layers.
      experts: the new number of experts of all layers, or numbers by the name of the layer.
      expert_tokens: the parameter tokens of each new expert beside a Pattention; None: as many as
        that has.
      top_k: the experts of a token: see `experts.Wanted`.
      **how: keys of the group `grow` of a config, such as method, place and step.

    Returns:
      The larger run, at the same step.

    Raises:
      UserError: the target exists, a size is not allowed, or a growth that must be exact changes
        the outputs. Nothing is written then.
    """
    config = configure.grow_config(self.config, how)
    counts = None if param_tokens is None else configure.counts(self.config.model, param_tokens)
    with self._to(target) as (source, to):
      wide = {'width': width, 'heads': heads, 'ffn_width': ffn_width}
      deep = {'layers': layers, 'pattern': pattern}
      more = None
      if experts is not None:
        of_layers = experts_lib.named_counts(source.model, experts, 'experts')
        more = experts_lib.Wanted(of_layers, expert_tokens, top_k)
      elif expert_tokens is not None or top_k is not None:
        raise UserError('expert_tokens and top_k are of new experts; say how many: experts=N')
      after = actions.wanted_model(
        source.model, config, param_tokens=counts, more=more, **deep, **wide
      )
      actions.grow(source, after, config, to)
    return self._open(target)

  def extract(self, target: Path) -> None:
    """Write only the tokens that the last growth added to a new directory, for `merge`."""
    with self._to(target) as (source, to):
      actions.extract(source, to)

  def merge(self, added: Path, target: Path, **how: Any) -> Self:
    """Append the tokens of another run, or of `extract`, to this run's in a new work directory."""
    with self._to(target) as (source, to):
      actions.merge(source, os.fspath(added), configure.grow_config(self.config, how), to)
    return self._open(target)

  def remove(self, target: Path, *, experts: Sequence[int] = (), **how: Any) -> Self:
    """Remove what the last growth or merge added, or experts by their numbers from 1 on.

    The result is in a new work directory.
    """
    with self._to(target) as (source, to):
      config = configure.grow_config(self.config, how)
      if experts:
        numbers = parse_numbers(','.join(map(str, experts)), 'experts', 'experts')
        expert_actions.remove(source, numbers, config, to)
      else:
        actions.remove(source, config, to)
    return self._open(target)

  def shrink(
    self,
    target: Path,
    param_tokens: Mapping[str, int] | None = None,
    *,
    experts: int | Mapping[str, int] | None = None,
    examples: int = 16,
    **how: Any,
  ) -> Self:
    """Keep the tokens that matter most for held-out examples, or the experts that they use most.

    Args:
      target: the new work directory.
      param_tokens: the numbers of tokens to keep, by projection.
      experts: instead, the number of experts to keep, of all layers or by the name of the layer.
      examples: the number of sequences or images to measure on.
      **how: keys of the group `grow` of a config.

    Raises:
      UserError: both or neither are given, or nothing becomes smaller.
    """
    if (param_tokens is None) == (experts is None):
      raise UserError('shrink needs either param_tokens or experts, the numbers to keep')
    with self._to(target) as (source, to):
      config = configure.grow_config(self.config, how)
      if experts is not None:
        kept = experts_lib.named_counts(source.model, experts, 'experts', dense=False)
        expert_actions.shrink(source, kept, examples, config, to)
      else:
        counts = configure.counts(self.config.model, param_tokens)
        actions.shrink(source, counts, examples, config, to)
    return self._open(target)

  @contextlib.contextmanager
  def _to(self, target: Path) -> Iterator[tuple[actions.Source, actions.Target]]:
    to = actions.Target(paths.parse_path(target))
    with actions.open_source(self.source, to) as source:
      yield source, to
