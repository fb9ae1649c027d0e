"""Values that a config may not have, by their kind, and what the refusal says."""

import pytest
from changing import refusal, resolved


@pytest.mark.parametrize(
  ('path', 'value', 'allowed'),
  [
    ('model.kind', 'lstm', 'lm, vit'),
    ('model.layer.mixer.kind', 'hyena', 'softmax, gated_unit, linear'),
    ('model.layer.mixer.qkv.kind', 'linear', 'pattention, dense'),
    ('model.layer.mixer.proj.kind', 'linear', 'pattention, dense, none'),
    ('model.layer.ffn.kind', 'mpl', 'pattention, mlp, experts, none'),
    (
      'model.layer.ffn.score.kind',
      'relu',
      'l2_norm_gelu, gelu_l2_norm, gelu_l1_norm, softmax, exp_l2_norm, gelu, linear',
    ),
    ('model.layer.ffn.score.gelu', 'erf', 'exact, tanh'),
    ('model.layer.norm', 'batch', 'plain, bias, affine, rms, rms_plain, rms_offset, none'),
    ('model.final_norm', 'batch', 'plain, bias, affine, rms, rms_plain, rms_offset, none'),
    ('model.layer.wiring.kind', 'sandwich', 'pre_norm, post_norm, skipless, parallel'),
    ('model.layer.mixer.positions.kind', 'alibi', 'rotary, none'),
    ('model.position_embedding', 'rotary', 'none, learned'),
    ('optim.schedule.kind', 'step', 'cosine, linear, wsd, constant'),
    ('train.remat', 'yes', 'auto, everything, score_inputs, dots, attention, full, offload'),
    ('train.layers', 'loop', 'auto, scan, unrolled'),
    ('train.attention', 'flash', 'auto, xla, cudnn, splash'),
    ('dtype', 'float16', 'auto, float32, bfloat16'),
    (
      'grow.method.kind',
      'copy',
      'group, zero_keys, duplicate, random, net2net, net2net_fill, hypercloning',
    ),
    ('grow.method.new_values', 'normal', 'zero, init'),
    ('grow.moments', 'keep', 'pad, drop'),
    ('grow.step', '0', 'keep, restart'),
  ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(path, value, allowed):
  want = f'config.{path} is {value!r}; it must be one of {allowed}'
  assert refusal(**{path.replace('.', '__'): value}) == want, 'the choices are not named'


INTEGERS = [
  'model.width',
  'model.layer.mixer.heads',
  'model.layer.mixer.qkv.tokens',
  'model.layer.mixer.proj.tokens',
  'model.layer.ffn.tokens',
  'data.sequence_length',
  'data.batch_size',
  'data.prefetch',
  'optim.accumulation_steps',
  'train.steps',
  'train.log_every',
  'train.checkpoint_every',
  'train.keep_checkpoints',
  'train.max_skipped_steps',
  'train.loss_chunk',
]
FLOATS = [
  'model.init.std',
  'model.norm_epsilon',
  'model.layer.mixer.positions.base',
  'optim.learning_rate',
  'optim.epsilon',
]


@pytest.mark.parametrize(
  ('path', 'value'),
  [
    *((path, 0) for path in INTEGERS),
    *((path, value) for path in FLOATS for value in (0.0, -1.0)),
  ],
)
def test_a_value_that_must_be_positive_and_is_not_is_refused(path, value):
  want = f'config.{path} is {value}; it must be greater than 0'
  assert refusal(**{path.replace('.', '__'): value}) == want, f'{path} cannot be {value}'


@pytest.mark.parametrize(
  ('path', 'value'),
  [
    ('model.vocab_size', -1),
    ('model.layer.ffn.reference', -1),
    ('model.max_length', -1),
    ('model.layer.mixer.window', -1),
    ('data.workers', -1),
    ('optim.warmup_steps', -1),
    ('optim.weight_decay', -0.1),
    ('optim.clip_norm', -1.0),
    ('optim.z_loss', -1e-4),
    ('train.seed', -1),
    ('train.eval_every', -1),
    ('train.eval_batches', -1),
    ('train.sample_tokens', -1),
    ('optim.new_token_warmup', -1),
    ('grow.method.noise', -0.1),
    ('grow.seed', -1),
  ],
)
def test_a_negative_value_is_refused_where_zero_is_the_least(path, value):
  want = f'config.{path} is {value}; it must not be negative'
  assert refusal(**{path.replace('.', '__'): value}) == want, f'{path} cannot be {value}'


@pytest.mark.parametrize(
  ('path', 'value', 'bound'),
  [
    ('model.layer.mixer.positions.fraction', -0.1, 'not be negative'),
    ('optim.schedule.final_fraction', 1.5, 'be at most 1'),
    ('optim.beta1', 1.0, 'be less than 1'),
    ('optim.beta2', -0.1, 'not be negative'),
    ('optim.layer_decay', 0.0, 'be greater than 0'),
    ('optim.layer_decay', 1.5, 'be at most 1'),
    *((path, float('nan'), 'be finite') for path in ('optim.layer_decay', 'optim.weight_decay')),
    *((path, float('nan'), 'be finite') for path in FLOATS),
    ('distill.weight', -1.0, 'not be negative'),
    ('train.ema', 1.0, 'be less than 1'),
    ('optim.clip_norm', float('inf'), 'be finite'),
    ('optim.learning_rate', float('inf'), 'be finite'),
    ('optim.beta1', float('-inf'), 'be finite'),
  ],
)
def test_the_bound_that_a_number_violates_is_named(path, value, bound):
  want = f'config.{path} is {value}; it must {bound}'
  assert refusal(**{path.replace('.', '__'): value}) == want, f'{path} cannot be {value}'


def test_an_integer_larger_than_any_float_is_told_as_well():
  assert 'it must be less than 2147483648' in refusal(model__width=10**400)


def test_examples_are_counted_in_64_bits():
  assert resolved(train__examples=2**40).train.examples == 2**40
  assert refusal(train__examples=2**63).endswith('must be less than 9223372036854775808')


@pytest.mark.parametrize('path', ['train.seed', 'grow.seed', 'train.steps', 'model.width'])
def test_an_integer_fits_in_32_bits(path):
  assert refusal(**{path.replace('.', '__'): 2**31}) == (
    f'config.{path} is 2147483648; it must be less than 2147483648'
  ), 'the run ends with a traceback'


@pytest.mark.parametrize(('value', 'bound'), [(0.0, 'be greater than 0'), (1.0, 'be less than 1')])
def test_no_split_may_be_empty(value, bound):
  assert refusal(data__validation_fraction=value) == (
    f'config.data.validation_fraction is {value}; it must {bound}'
  )


@pytest.mark.parametrize('value', [('wandb', 'mlflow'), ['wandb', 'mlflow']])
def test_names_may_be_a_list_or_a_tuple(value):
  assert resolved(train__trackers=value).train.trackers == ('wandb', 'mlflow')


@pytest.mark.parametrize(
  ('value', 'reason'),
  [
    ('wandb', "is 'wandb'; it must be a list of names, such as ('tensorboard',)"),
    (3, "is 3; it must be a list of names, such as ('tensorboard',)"),
    (['wandbb'], "has 'wandbb', which is unknown; did you mean 'wandb'?"),
    (['wandb', 'wandb'], "is ['wandb', 'wandb']; it names wandb twice; leave one out"),
  ],
)
def test_a_list_of_names_has_known_ones_once(value, reason):
  assert refusal(train__trackers=value) == f'config.train.trackers {reason}'
