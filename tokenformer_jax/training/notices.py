"""Say where a run starts, what it changes there, and which settings are probably a mistake."""

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, skip_window
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.model import kernels, models
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.parallel import messages
from tokenformer_jax.resolve import checks
from tokenformer_jax.resolve.adapt import adapted
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.storage import paths
from tokenformer_jax.training.prepare import PreparedRun


def say_changes(run: PreparedRun) -> None:
  """Print where a run starts, the settings that it changes, and a new order of its data."""
  config, meta, begins = run.config, run.origin.meta, run.position
  if meta is None:
    return
  if run.origin.other is not None:
    messages.say(_start(config, meta))
  if changed := checks.changed_settings(config, run.origin):
    messages.say(f'different from step {meta.step} on: {"; ".join(changed)}')
  if begins.step and meta.seen.samples and not begins.sample:
    changes = run.order_changes or ['config.data.new_order_at asks for it']
    messages.say(
      f'a new order of the data begins after step {begins.step} with its first sample: '
      f'{" and ".join(changes)}'
    )


def _start(config: Config, meta: Meta) -> str:
  """Return a sentence: what a run takes from `config.init_from`, and how its model grows."""
  directory, _ = paths.split_source(config.init_from)
  if meta.contents != 'model' or config.grow.moments == 'drop':
    takes = 'its parameters alone'
  else:
    takes = 'its parameters and optimizer state'
  if meta.step and config.grow.step == 'restart':
    takes += ', from step 0 on'
  source = adapted(meta.config.model, config.model)
  grown = [
    f'{path}: {old!r} -> {new!r}'
    for path, new, old in config_lib.differences(config.model, source, 'model.')
    if not (path.endswith('.reference') and not new)  # The groups have reference counts.
  ]
  if grown:
    before, after = (models.define(model).count for model in (source, config.model))
    grown.append(f'{before:,} -> {after:,} parameters')
  grows = f'it grows: {"; ".join(grown)}' if grown else 'it does not grow'
  return f'starting with the model of {directory}, step {meta.step} ({takes}); {grows}'


def warnings_for(config: Config, growth: LastGrowth | None) -> list[str]:
  """Return sentences about allowed settings that are probably a mistake.

  `config` has every length in steps.
  """
  sentences = []
  length = config.data.sequence_length
  kernel = kernels.kernel(config.train.attention, Execution.from_config(config).dtype)
  for name, layer in config.model.layers.items():
    clip = getattr(getattr(layer.mixer, 'positions', None), 'clip', 0)
    if config.model.kind == 'lm' and clip >= length:
      sentences.append(
        f'config.{layer_path(name)}.mixer.positions.clip={clip} limits no distance in texts of '
        f'config.data.sequence_length={length}; take less than {length}, or 0 and '
        f'--clip_positions={clip} when longer texts are written'
      )
    cap = getattr(layer.mixer, 'score_cap', 0)
    if cap and kernel == 'cudnn':
      sentences.append(
        f'config.{layer_path(name)}.mixer.score_cap={cap:g} is unknown to cuDNN, so XLA computes '
        'this attention, more slowly and with more memory'
      )
  remat = config.train.remat
  is_full = {'offload': jax.default_backend() == 'cpu', 'attention': kernel != 'splash'}
  if is_full.get(remat):
    sentences.append(
      f'config.train.remat={remat} keeps no more on these devices than config.train.remat=full, '
      'the input of each layer; take full, or auto'
    )
  steps, warmup = config.train.steps, config.optim.warmup_steps
  begin = schedules.first_update(config.optim, growth)
  if begin + warmup > steps:
    after = f' after the last growth, at update {begin},' if begin else ''
    sentences.append(
      f'the warm-up of config.optim.warmup_steps={warmup}{after} is longer than the run of '
      f'config.train.steps={steps}, so the rate never reaches config.optim.learning_rate; set '
      f'it to {max(0, steps - begin) // 10}, or train longer'
    )
  if (needed := -(-skip_window(config.optim) // 2)) and needed >= steps:
    sentences.append(
      f'config.optim.skip_window={config.optim.skip_window} judges a step by {needed} good ones '
      f'before it at least, more than a run of config.train.steps={steps} has, so '
      'optim.skip_deviations skips none; take a smaller window, or train longer'
    )
  if config.train.check_devices > steps:
    sentences.append(
      f'config.train.check_devices={config.train.check_devices} checks no step of a run of '
      f'config.train.steps={steps}; take at most that, or train longer'
    )
  return sentences
