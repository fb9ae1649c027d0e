"""Find settings of a run that are allowed, and probably a mistake."""

import jax

from tokenformer_jax.config import Config, skip_window
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.model import kernels
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.entries import LastGrowth


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
