"""Make a dense model into one with routed experts, and add experts: the models before and after.

  upcycling   every expert is a copy of a dense feed-forward part, and the router is drawn
              (Komatsuzaki et al. 2022, arXiv 2212.05055)
  routing     the dense part stays on for all tokens as `shared`; routed experts add zero at first
  more        experts behind those of a mixture; they add zero at first

Growth has three stages: parameter tokens, experts, layers. `narrow` is the model between the first
two. The arrays are made in `expert_arrays.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from tokenformer_jax.config.matching import copies_dense, named_layers
from tokenformer_jax.config.model import layer_path, used_layers
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.model.mlp import hidden_width


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

  Raises:
    UserError: a layer has another feed-forward part, or the values do not fit together.
  """

  def grown(name: str, layer: LayerConfig) -> LayerConfig:
    if name not in more.counts:
      return layer
    new = _with_experts(layer.ffn, more.counts[name], more, f'{layer_path(name)}.ffn')
    return dataclasses.replace(layer, ffn=new)

  after = model.map_layers(grown)
  check_model(after)
  return after


def _with_experts(ffn: Any, count: int, more: Wanted, path: str) -> ExpertsConfig:
  """Return a feed-forward part with `count` experts."""
  if more.tokens is not None and not isinstance(ffn, PattentionConfig):
    advice = (
      'its experts grow by --param_tokens=ffn.expert=N --method=zero_keys'
      if isinstance(ffn, ExpertsConfig)
      else 'its copies are as large as it is'
    )
    raise UserError(
      f'--expert_tokens is for new experts beside a Pattention, and {path}.kind is {ffn.kind}; '
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

  Raises:
    UserError: no layer of the model counts, or a name is unknown.
  """
  none = (NoFeedForwardConfig,) if dense else (NoFeedForwardConfig, MLPConfig, PattentionConfig)
  names = [name for name, layer in used_layers(model).items() if not isinstance(layer.ffn, none)]
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
  """Return a model with fewer experts in the named layers.

  Raises:
    UserError: a layer would have fewer than its tokens choose, or the groups of its balance do not
      divide them.
  """

  def changed(name: str, layer: LayerConfig) -> LayerConfig:
    if name not in counts:
      return layer
    return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, count=counts[name]))

  after = model.map_layers(changed)
  check_model(after)
  return after


def expert_counts(model: ModelConfig) -> dict[str, int]:
  """Return the number of experts of each layer with experts, by the name of the layer."""
  return {name: ffn.count for name, ffn in model.experts.items()}


def narrow(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the target with the source's experts: the model before experts are added."""
  before = named_layers(source)

  def narrowed(name: str, layer: LayerConfig) -> LayerConfig:
    old, new = before[name].ffn if name in before else layer.ffn, layer.ffn
    if not isinstance(new, ExpertsConfig) or isinstance(old, NoFeedForwardConfig):
      return layer
    if not isinstance(old, ExpertsConfig):
      part = new.expert if copies_dense(new) else new.shared
      ffn = old if _equal_widths(old, part, source) else part
    elif old.count == new.count:
      return layer
    else:
      router = dataclasses.replace(new.router, top_k=old.router.top_k)
      ffn = dataclasses.replace(new, count=old.count, router=router)
    return dataclasses.replace(layer, ffn=ffn)

  return target.map_layers(narrowed)


def _equal_widths(a: Any, b: Any, model: ModelConfig) -> bool:
  """Return whether two MLPs are equal, where a width of 0 is the default width."""
  if not isinstance(a, MLPConfig) or not isinstance(b, MLPConfig):
    return False
  return dataclasses.replace(a, width=hidden_width(a, model)) == dataclasses.replace(
    b, width=hidden_width(b, model)
  )


def check(source: ModelConfig, target: ModelConfig) -> None:
  """Check that no layer of the target has fewer experts than in the source, a model from `narrow`.

  Raises:
    UserError: a layer has fewer.
  """
  for name, old, new in _pairs(source, target):
    if isinstance(old, ExpertsConfig) and new.count < old.count:
      raise UserError(
        f'{layer_path(name)}.ffn has {old.count} experts in the source, and {new.count} are fewer; '
        'growth only adds (tokenformer grow shrink --experts=N drops the least used ones)'
      )


def inexact(source: ModelConfig, target: ModelConfig) -> str | None:
  """Return why added experts change what the model computes, or None if they do not.

  This ignores the router's jitter and the smaller capacity of training.
  """
  found = (
    _inexact(f'{layer_path(name)}.ffn', old, new) for name, old, new in _pairs(source, target)
  )
  return next(filter(None, found), None)


def _inexact(path: str, old: Any, new: ExpertsConfig) -> str | None:
  router, is_mixture = new.router, isinstance(old, ExpertsConfig)
  if not is_mixture and not copies_dense(new):
    return f'shared_gate of {path} multiplies the dense part' if new.shared_gate else None
  everyone = router.top_k == new.count
  if is_mixture:
    # The sigmoid gates of old experts do not change.
    apart, all_before = router.gates == 'sigmoid', old.router.top_k == old.count
    if all_before and everyone and apart and not router.renormalize:
      reason = None
    elif router.top_k != old.router.top_k:
      reason = f'tokens of {path} choose {router.top_k} experts in the place of {old.router.top_k}'
    elif not apart:
      reason = f'the softmax of the router of {path} gives new experts a part of the gates'
    elif not isinstance(new.balance, BiasBalanceConfig):
      reason = f'tokens of {path} may choose new experts, which add nothing yet, before old ones'
    else:
      reason = None
  elif router.renormalize or (everyone and router.gates == 'softmax'):
    reason = None
  else:
    reason = (
      f'the gates of {path} do not add up to 1; with router.renormalize and top_k of at least 2 '
      'they would'
    )
  return reason or _dropped(path, new)


def _dropped(path: str, ffn: ExpertsConfig) -> str | None:
  """Return why experts may drop tokens, or None if they do not."""
  dispatch = ffn.dispatch
  if not isinstance(dispatch, CapacityConfig):
    return f'{path}.dispatch.device_factor may drop tokens' if dispatch.device_factor else None
  needed = ffn.count / ffn.router.top_k
  if dispatch.eval_factor >= needed:
    return None
  return (
    f'the experts of {path} have no places for all tokens, with dispatch.eval_factor='
    f'{dispatch.eval_factor:g}; dispatch.kind=grouped or a factor of {needed:g} has'
  )


def _pairs(source: ModelConfig, target: ModelConfig) -> Iterator[tuple[str, Any, ExpertsConfig]]:
  """Yield the name and the old and new feed-forward part of each layer that gets experts."""
  after = used_layers(target)
  for name, layer in used_layers(source).items():
    old, new = layer.ffn, after[name].ffn
    if old != new and isinstance(new, ExpertsConfig):
      yield name, old, new


def balanced_by_bias(model: ModelConfig) -> ModelConfig:
  """Return the model with balance by a bias in every router, from which `loads` measures."""

  def changed(name: str, layer: LayerConfig) -> LayerConfig:
    del name
    ffn = layer.ffn
    if not isinstance(ffn, ExpertsConfig) or isinstance(ffn.balance, BiasBalanceConfig):
      return layer
    return dataclasses.replace(layer, ffn=dataclasses.replace(ffn, balance=BiasBalanceConfig()))

  return model.map_layers(changed)


def without(model: ModelConfig, numbers: Sequence[int], where: str) -> ModelConfig:
  """Return the model without some experts, by their numbers from 1, in each layer with experts.

  Raises:
    UserError: a layer has no such expert, or would keep too few.
  """
  counts = expert_counts(model)
  named_counts(model, 1, where, dense=False)  # refuses a model without experts
  for name, count in counts.items():
    path = f'{layer_path(name)}.ffn'
    if max(numbers) > count:
      raise UserError(
        f'{where} names expert {max(numbers)}, and {path} has the experts 1 to {count}'
      )
    if len(numbers) == count:
      raise UserError(f'{path} would keep none of its {count} experts; name fewer in {where}')
  return with_counts(model, {name: count - len(numbers) for name, count in counts.items()})


def smaller(model: ModelConfig, counts: Mapping[str, int], where: str) -> ModelConfig:
  """Return the model with fewer experts in the named layers, and as many in the others.

  Raises:
    UserError: a number is larger, or none is smaller; or see `with_counts`.
  """
  before = expert_counts(model)
  for name, count in counts.items():
    if count > before[name]:
      raise UserError(
        f'{layer_path(name)}.ffn has {before[name]} experts, and shrink cannot make {count} of them'
      )
  if all(before[name] == count for name, count in counts.items()):
    raise UserError(f'nothing would shrink; give a smaller number of experts by {where}')
  return with_counts(model, counts)
