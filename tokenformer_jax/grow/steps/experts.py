"""Make a dense model into one with routed experts, add experts, and take some out.

  upcycling   every expert is a copy of a dense feed-forward part, and the router is drawn
              (Komatsuzaki et al. 2022, arXiv 2212.05055)
  routing     the dense part stays on for all tokens as `shared`; routed experts add zero at first
  more        experts behind those of a mixture; they add zero at first

A growth adds parameter tokens, then experts, then layers: `narrow` is the model between the first
two. Arrays of experts and routers have the axes `experts` and `routes`, along which new experts lie
behind the old ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tokenformer_jax.config import (
  BiasBalanceConfig,
  CapacityConfig,
  ExpertsConfig,
  LayerConfig,
  MLPConfig,
  ModelConfig,
  NoFeedForwardConfig,
  PattentionConfig,
  RouterConfig,
)
from tokenformer_jax.config.check_model import check_model
from tokenformer_jax.config.matching import copies_dense, new_experts
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.errors import UserError, arg, nearest
from tokenformer_jax.grow.steps.step import Arrays, Keys, Selection, Step
from tokenformer_jax.model import models
from tokenformer_jax.model.mlp import hidden_width
from tokenformer_jax.model.params import ParamInfo, Params, Path, Role, lookup
from tokenformer_jax.tasks import Batch, Task


class Wanted(NamedTuple):
  """The experts to give to a model.

  Attributes:
    counts: the new numbers of experts by the name of the layer, from `named_counts`.
    tokens: the parameter tokens of each new expert; None: as many as the Pattention has.
    top_k: the experts of a token; None: as in the mixture, else 1 beside a Pattention, and 2 of
      those made from an MLP.
  """

  counts: Mapping[str, int]
  tokens: int | None = None
  top_k: int | None = None


def wanted(model: ModelConfig, more: Wanted) -> ModelConfig:
  """Return a model with more experts, or with experts instead of dense parts.

  A Pattention becomes `shared`, with experts beside it. An MLP becomes experts; each token uses two
  of them, whose gates add up to 1.
  """
  layers = model.named_layers
  after = _with_parts(
    model,
    {
      name: _with_experts(layers[name].ffn, count, more, f'{layer_path(name)}.ffn')
      for name, count in more.counts.items()
    },
  )
  check_model(after)
  return after


def _with_experts(ffn: Any, count: int, more: Wanted, path: str) -> ExpertsConfig:
  """Return a feed-forward part with `count` experts."""
  if more.tokens is not None and not isinstance(ffn, PattentionConfig):
    advice = (
      f'its experts grow by {arg.param_tokens}=ffn.expert=N {arg.method}=zero_keys'
      if isinstance(ffn, ExpertsConfig)
      else 'its copies are as large as it is'
    )
    raise UserError(
      f'{arg.expert_tokens} is for new experts beside a Pattention, and {path}.kind is {ffn.kind}; '
      f'leave it out ({advice})'
    )
  if isinstance(ffn, ExpertsConfig):
    router = dataclasses.replace(ffn.router, top_k=more.top_k or ffn.router.top_k)
    return dataclasses.replace(ffn, count=count, router=router)
  if isinstance(ffn, PattentionConfig):
    size = more.tokens or ffn.tokens
    expert = PattentionConfig(tokens=size, reference=size, score=ffn.score)
    return ExpertsConfig(count, expert, ffn, RouterConfig(top_k=more.top_k or 1))
  if ffn.bias:
    raise UserError(
      f'{path}.bias is True, and experts have no biases, so that it cannot become experts; grow a '
      'model without biases'
    )
  top_k = more.top_k or 2
  return ExpertsConfig(count, ffn, router=RouterConfig(top_k=top_k, renormalize=top_k > 1))


def named_counts(
  model: ModelConfig, given: int | Mapping[str, int], where: str, *, dense: bool = True
) -> dict[str, int]:
  """Return numbers of experts by layer, given one number for all layers, or numbers by layer.

  With `dense`, layers without experts count as well. `where` is the source of `given` in a message.
  """
  none = (NoFeedForwardConfig,) if dense else (NoFeedForwardConfig, MLPConfig, PattentionConfig)
  names = [name for name, layer in model.layers.items() if not isinstance(layer.ffn, none)]
  if not names:
    what = 'a feed-forward part' if dense else 'experts'
    raise UserError(f'{where} counts experts, and no layer of this model has {what}')
  counts = dict.fromkeys(names, given) if isinstance(given, int) else dict(given)
  for name, count in counts.items():
    if name not in names:
      raise UserError(f'{where} names the layer {name!r}{nearest(name, names)}')
    if not 1 <= count <= 2**16:
      raise UserError(f'{where} is {count} for {name}; it must be at least 1 and at most {2**16}')
  return counts


def with_counts(model: ModelConfig, counts: Mapping[str, int]) -> ModelConfig:
  """Return a model with fewer experts in the named layers."""
  layers = model.named_layers
  fewer = {n: dataclasses.replace(layers[n].ffn, count=count) for n, count in counts.items()}
  after = _with_parts(model, fewer)
  check_model(after)
  return after


def narrow(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the target with the source's experts: the model before experts are added."""

  def without_new(old: Any, new: ExpertsConfig) -> Any:
    if not isinstance(old, ExpertsConfig):
      dense = new.expert if copies_dense(new) else new.shared
      return old if _equal_widths(old, dense, source) else dense
    router = dataclasses.replace(new.router, top_k=old.router.top_k)
    return dataclasses.replace(new, count=old.count, router=router)

  return _with_parts(
    target, {name: without_new(old, new) for name, old, new in new_experts(source, target)}
  )


def _with_parts(model: ModelConfig, parts: Mapping[str, Any]) -> ModelConfig:
  """Return a model with other feed-forward parts of the named layers."""

  def changed(name: str, layer: LayerConfig) -> LayerConfig:
    return dataclasses.replace(layer, ffn=parts.get(name, layer.ffn))

  return model.map_layers(changed)


def _equal_widths(a: Any, b: Any, model: ModelConfig) -> bool:
  """Return whether two MLPs are equal, where a width of 0 is the default width."""
  if not isinstance(a, MLPConfig) or not isinstance(b, MLPConfig):
    return False
  return dataclasses.replace(a, width=hidden_width(a, model)) == dataclasses.replace(
    b, width=hidden_width(b, model)
  )


@dataclasses.dataclass(frozen=True)
class AddExperts(Step):
  """Adds experts to mixtures, and makes dense feed-forward parts into mixtures.

  The model before is from `narrow`; both models have the same layers.
  """

  def _layers(self) -> Iterator[tuple[str, Any, ExpertsConfig]]:
    """Yield the path and the old and new feed-forward part of each layer that gets experts."""
    used = self.after.layers
    for name, old, new in new_experts(self.before, self.after):
      if name in used:
        yield f'{layer_path(name)}.ffn', old, new

  def check(self) -> None:
    for path, old, new in self._layers():
      if isinstance(old, ExpertsConfig) and new.count < old.count:
        raise UserError(
          f'{path} has {old.count} experts in the source, and {new.count} are fewer; growth only '
          'adds (tokenformer grow shrink --experts=N drops the least used ones)'
        )

  def inexact(self) -> str:
    """Return why added experts change what the model computes, or ''.

    This ignores the router's jitter and the smaller capacity of training.
    """
    return next(filter(None, (_inexact(*layer) for layer in self._layers())), '')

  def _source(self, path: Path) -> Path | None:
    """Return the path of the array that the one at `path` is made from; None for a new array."""
    return next(filter(self.had, self._former(path)), None)

  def _former(self, path: Path) -> Iterator[Path]:
    """Yield the paths that the array at `path` can have in the model before."""
    yield path
    for at, key in enumerate(path):
      rest = (*path[:at], *path[at + 1 :])
      if key.key == 'shared':
        yield rest
      is_expert = key.key == 'experts' and 'experts' in self.info(path).axes
      if is_expert and 'shared' not in lookup(models.define(self.after).abstract, path[:at]):
        yield from (rest, (*rest, DictKey('kernel')))  # of a Pattention, or of an MLP

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    """Return the parameter at `path`.

    Routers are drawn. New experts are drawn as in a new model, but add zero. A bias for the choice
    is so low for new experts that tokens choose the old ones, as long as no bias moves.
    """
    info, dtype = self.info(path), self.like(path).dtype

    def fresh(shape: tuple[int, ...], array: jax.Array | None) -> jax.Array:
      if info.adds_to_residual:
        return jnp.zeros(shape, dtype)
      if info.role is Role.BALANCE and array is not None:
        return jnp.broadcast_to(jnp.min(array, info.expert_axis, keepdims=True) - 1, shape)
      return (info.first or info.initializer)(jax.random.fold_in(keys(path), 3), shape, dtype)

    return self._extended(path, old, fresh)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of gradients (order 1) or of their squares (2); zero for new experts.

    The gradients of E copies add up to the old one, because gates add up to 1: each has 1/E of the
    mean. A copy gets K/E of the tokens with a gate of about 1/K, and the squares of terms of random
    signs add up, so it has 1/(E K) of the mean square.
    """
    return self._extended(path, old, lambda shape, _: jnp.zeros(shape), order)

  def _extended(
    self,
    path: Path,
    old: Arrays,
    fresh: Callable[[tuple[int, ...], jax.Array | None], jax.Array],
    order: int = 0,
  ) -> jax.Array:
    """Return the old array, the shares of its copies, or `fresh` entries behind the old ones."""
    source, axis, shape = self._source(path), self.info(path).expert_axis, self.like(path).shape
    array = None if source is None else old(source)
    if array is not None and array.shape == shape:
      return array
    assert axis is not None, f'{path} has no experts, and changes'
    if array is None:
      return fresh(shape, None)
    if array.ndim < len(shape):
      share = array / self.copies(path, order) if order else array
      return jnp.broadcast_to(jnp.expand_dims(share, axis), shape)
    added = (*shape[:axis], shape[axis] - array.shape[axis], *shape[axis + 1 :])
    return jnp.concatenate([array, fresh(added, array)], axis)

  def copies(self, path: Path, order: int) -> int:
    """Return the number that a moment is divided by for each copy."""
    info, count = self.info(path), self.like(path).shape[self.info(path).expert_axis]
    return count if order == 1 else count * round(info.active * count)

  def inverse(self) -> Step:
    return RemoveExperts(self.after, self.before, self)

  @functools.cached_property
  def targets(self) -> dict[Path, Path]:
    """The path after the step of each array of the model before."""
    paths = (p for p, _ in jax.tree_util.tree_leaves_with_path(models.define(self.after).abstract))
    return {source: path for path in paths if (source := self._source(path)) is not None}


@dataclasses.dataclass(frozen=True)
class RemoveExperts(Step):
  """Takes added experts out again; of copies of a dense part the first one stays."""

  added: AddExperts

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    return self._first(path, old)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    larger = self.added.targets[path]
    kept = self._first(path, old)
    if len(self.like(path).shape) == len(lookup(self.info_before, larger).axes):
      return kept
    return kept * self.added.copies(larger, order)

  def _first(self, path: Path, old: Arrays) -> jax.Array:
    larger, shape = self.added.targets[path], self.like(path).shape
    array, axis = old(larger), lookup(self.info_before, larger).expert_axis
    if array.shape == shape:
      return array
    if len(shape) < array.ndim:
      return jnp.take(array, 0, axis)
    return jax.lax.slice_in_dim(array, 0, shape[axis], axis=axis)


@dataclasses.dataclass(frozen=True)
class TakeExperts(Selection):
  """Keeps the experts of each layer with the numbers [L, N] in `data`, from 0."""

  def select(self, path: Path, old: Arrays) -> jax.Array:
    array, axis = old(path), self.info(path).expert_axis
    if axis is None:
      return array
    kept_LxN = self.own(path)
    shape = [1] * array.ndim
    shape[0], shape[axis] = kept_LxN.shape
    return jnp.take_along_axis(array, kept_LxN.reshape(shape), axis)


def _inexact(path: str, old: Any, new: ExpertsConfig) -> str:
  """Return why a layer with more experts computes something else, or ''."""
  router, is_mixture = new.router, isinstance(old, ExpertsConfig)
  if not is_mixture and not copies_dense(new):
    return f'shared_gate of {path} multiplies the dense part' if new.shared_gate else ''
  everyone = router.top_k == new.count
  if is_mixture:
    # The sigmoid gates of old experts do not change.
    apart, all_before = router.gates == 'sigmoid', old.router.top_k == old.count
    if all_before and everyone and apart and not router.renormalize:
      reason = ''
    elif router.top_k != old.router.top_k:
      reason = f'tokens of {path} choose {router.top_k} experts in the place of {old.router.top_k}'
    elif not apart:
      reason = f'the softmax of the router of {path} gives new experts a part of the gates'
    elif not isinstance(new.balance, BiasBalanceConfig):
      reason = f'tokens of {path} may choose new experts, which add nothing yet, before old ones'
    else:
      reason = ''
  elif router.renormalize or (everyone and router.gates == 'softmax'):
    reason = ''
  else:
    reason = (
      f'the gates of {path} do not add up to 1; with router.renormalize and top_k of at least 2 '
      'they would'
    )
  return reason or _dropped(path, new)


def _dropped(path: str, ffn: ExpertsConfig) -> str:
  """Return why experts may drop tokens, or ''."""
  dispatch = ffn.dispatch
  if not isinstance(dispatch, CapacityConfig):
    return f'{path}.dispatch.device_factor may drop tokens' if dispatch.device_factor else ''
  needed = ffn.count / ffn.router.top_k
  if dispatch.eval_factor >= needed:
    return ''
  return (
    f'the experts of {path} have no places for all tokens, with dispatch.eval_factor='
    f'{dispatch.eval_factor:g}; dispatch.kind=grouped or a factor of {needed:g} has'
  )


def balanced_by_bias(model: ModelConfig) -> ModelConfig:
  """Return the model with balance by a bias in every router, from which `loads` measures."""
  balanced = {
    name: dataclasses.replace(ffn, balance=BiasBalanceConfig())
    for name, ffn in model.experts.items()
    if not isinstance(ffn.balance, BiasBalanceConfig)
  }
  return _with_parts(model, balanced)


def without(model: ModelConfig, numbers: Sequence[int], where: str) -> ModelConfig:
  """Return the model without some experts, by their numbers from 1, in each layer with experts."""
  named_counts(model, 1, where, dense=False)  # refuses a model without experts
  fewer = {}
  for name, ffn in model.experts.items():
    path = f'{layer_path(name)}.ffn'
    if max(numbers) > ffn.count:
      raise UserError(
        f'{where} names expert {max(numbers)}, and {path} has the experts 1 to {ffn.count}'
      )
    if len(numbers) == ffn.count:
      raise UserError(f'{path} would keep none of its {ffn.count} experts; name fewer in {where}')
    fewer[name] = ffn.count - len(numbers)
  return with_counts(model, fewer)


def smaller(model: ModelConfig, counts: Mapping[str, int], where: str) -> ModelConfig:
  """Return the model with fewer experts in the named layers, and as many in the others."""
  before = {name: model.experts[name].count for name in counts}
  for name, count in counts.items():
    if count > before[name]:
      raise UserError(
        f'{layer_path(name)}.ffn has {before[name]} experts, and shrink cannot make {count} of them'
      )
  if before == counts:
    raise UserError(f'nothing would shrink; give a smaller number of experts by {where}')
  return with_counts(model, counts)


def loads(task: Task, params: Params, batch: Batch) -> Params:
  """Return the share of all choices that each expert has, float32 [L, E] for each array of experts.

  It is the gradient of the auxiliary loss with respect to the router's balancing bias
  (`router._as_gradient`), plus 1/E. The task is that of a model from `experts.balanced_by_bias`,
  whose biases may be missing in `params`. Other arrays have the scalar 0.
  """
  info, abstract = task.definition.info, task.definition.abstract
  known = dict(jax.tree_util.tree_leaves_with_path(params))

  def fill(path: Path, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return known[path] if path in known else jnp.zeros(shape.shape, shape.dtype)

  filled = jax.tree.map_with_path(fill, abstract)
  biases = {
    path: lookup(filled, path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(info)
    if leaf.role is Role.BALANCE
  }

  def auxiliary(biases: dict[Path, jax.Array]) -> jax.Array:
    bound = jax.tree.map_with_path(lambda path, p: biases.get(path, p), filled)
    sums = task.sums(bound, batch)
    loss, _ = sums.aux.divided(sums.counts)
    assert loss is not None, 'the model has no experts'
    return loss

  excess = jax.grad(auxiliary)(biases)
  # The module of each bias is the router, which lies beside the experts.
  shares = {path[:-2]: share + 1 / share.shape[-1] for path, share in excess.items()}

  def load(path: Path, _: jax.Array) -> jax.Array:
    if lookup(info, path).expert_axis is None:
      return jnp.zeros(())
    return next(shares[path[:at]] for at in range(len(path)) if path[:at] in shares)

  return jax.tree.map_with_path(load, params)


def most_used(loads: Params, info: Params, smaller: Params) -> Params:
  """Return the numbers [L, N] of the most used experts, in rising order, for `TakeExperts`.

  `smaller` has the shapes of the arrays of the model with N experts.
  """

  def choose(info: ParamInfo, load: jax.Array, array: jax.ShapeDtypeStruct) -> jax.Array:
    axis = info.expert_axis
    return load if axis is None else jnp.sort(jax.lax.top_k(load, array.shape[axis])[1], axis=-1)

  return jax.tree.map(choose, info, loads, smaller)


def all_but(model: ModelConfig, gone: Sequence[int]) -> Params:
  """Return the numbers [L, N] of all experts but `gone`, counted from 1, for `TakeExperts`."""
  definition = models.define(model)

  def choose(info: ParamInfo, array: jax.ShapeDtypeStruct) -> np.ndarray:
    axis = info.expert_axis
    if axis is None:
      return np.zeros((), np.int32)
    kept = [i for i in range(array.shape[axis]) if i + 1 not in gone]
    return np.tile(np.array(kept, np.int32), (array.shape[0], 1))

  return jax.tree.map(choose, definition.info, definition.abstract)
