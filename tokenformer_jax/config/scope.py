"""Keys that have a meaning only for one kind of model, or with another key of their section."""

from collections.abc import Iterator
from typing import NamedTuple

from tokenformer_jax.config import names
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import leaves

_ONLY = {
  'lm': [
    'model.init.embedding_std',
    'model.embedding_norm',
    'model.embedding_scale',
    'model.vocab_size',
    'model.scaled_logits',
    'mixer.window',
    'data.mixture',
    'data.validation_source',
    'data.deduplicate',
    'data.rows',
    'data.chat_template',
    'data.text_field',
    'data.tokenizer',
    'data.documents',
    'data.sequence_length',
    'data.sequence_length_by_step',
    'data.store',
    'optim.z_loss',
    'train.sample_tokens',
    'train.sample_prompt',
    'train.receptive_field',
    'train.loss_chunk',
    'distill',
  ],
  'vit': [
    'model.patch',
    'model.channels',
    'model.classes',
    'model.pool',
    'data.image_size',
    'data.crop_area',
    'data.flip',
    'data.rand_augment',
    'data.rand_augment_std',
    'data.color_jitter',
    'data.erase',
    'data.eval_crop',
    'data.on_bad_image',
    'optim.mixup',
    'optim.cutmix',
    'optim.label_smoothing',
    'optim.drop_path',
  ],
}


class Need(NamedTuple):
  """The values of another key with which a key has a meaning; none: any that is set."""

  key: str  # beside the key that needs it, such as `wiring.kind`
  values: tuple[str, ...] = ()

  @property
  def text(self) -> str:
    """The need as `KEY=VALUE|VALUE`, or `KEY`."""
    return f'{self.key}={"|".join(self.values)}' if self.values else self.key


_ADAM, _DECAYS = ('adamw', 'muon', 'lion'), ('cosine', 'linear', 'wsd')
_NEEDS = {
  'optim.final_fraction': [Need('schedule', _DECAYS)],
  'optim.decay_share': [Need('schedule', ('wsd',))],
  'optim.decay_shape': [Need('schedule', ('wsd',))],
  'optim.beta1': [Need('name', _ADAM)],
  'optim.beta2': [Need('name', _ADAM)],
  'optim.epsilon': [Need('name', ('adamw', 'muon'))],
  'optim.momentum': [Need('name', ('muon',))],
  'optim.skip_window': [Need('skip_deviations')],
  'optim.new_token_correction': [Need('name', ('adamw',))],
  'train.device_checker': [Need('check_devices')],
  'distill.weight': [Need('teacher')],
  'distill.temperature': [Need('teacher')],
  'mixer.value_skip': [Need('value.kind', ('as_key', 'pattention', 'dense'))],
  'mixer.proj_skip': [Need('proj.kind', ('pattention', 'dense'))],
  'ffn.shared_gate': [Need('shared.kind', ('pattention', 'mlp'))],
  'ffn_norm': [
    Need('ffn.kind', ('pattention', 'mlp', 'experts')),
    Need('wiring.kind', ('pre_norm', 'post_norm', 'skipless')),
  ],
}


def kind_of_model(path: str) -> str:
  """Return the `model.kind` that a key is for, or '' for every kind."""
  for kind, keys in _ONLY.items():
    if any(f'.{path}.'.find(f'.{key}.') >= 0 for key in keys):
      return kind
  return ''


def needs(path: str) -> list[Need]:
  """Return what a key needs of the other keys of its section."""
  return next((found for key, found in _NEEDS.items() if f'.{path}'.endswith(f'.{key}')), [])


def check_scope(config: Config) -> None:
  """Check that no key is set that has no meaning for the other values of a config.

  Raises:
    UserError: one is.
  """
  values = {leaf.path: leaf.value for leaf in leaves(config)}
  for leaf in leaves(config):
    if leaf.value == leaf.default:
      continue
    kind = kind_of_model(leaf.path)
    if kind not in ('', config.model.kind):
      raise names.meaningless(leaf.path, leaf.value, f'model.kind={kind}', config.model.kind)
    for need, here in _unmet(leaf.path, values):
      section = f'{leaf.path.rpartition(".")[0]}.'
      needed = f'{section}{need.key}' + (f'={" or ".join(need.values)}' if need.values else '')
      raise names.meaningless(leaf.path, leaf.value, needed, here)


def _unmet(path: str, values: dict[str, object]) -> Iterator[tuple[Need, str]]:
  """Yield what a key needs and lacks, with the present value of the other key."""
  section = f'{path.rpartition(".")[0]}.'
  for need in needs(path):
    here = values[f'{section}{need.key}']
    if not (here in need.values if need.values else here):
      yield need, str(here or '')
