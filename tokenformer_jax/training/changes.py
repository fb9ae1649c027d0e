"""Say where a run starts, and what it changes there."""

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import models
from tokenformer_jax.parallel import messages
from tokenformer_jax.resolve import continuation
from tokenformer_jax.resolve.adapt import adapted
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths
from tokenformer_jax.training.prepare import PreparedRun


def say_changes(run: PreparedRun) -> None:
  """Print where a run starts, the settings that it changes, and a new order of its data."""
  config, meta, begins = run.config, run.origin.meta, run.position
  if meta is None:
    return
  if run.origin.other is not None:
    messages.say(_start(config, meta))
  if changed := continuation.changed_settings(config, run.origin):
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
