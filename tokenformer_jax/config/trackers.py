"""The table of trackers, which show the figures of a run beside its metrics.jsonl.

A new tracker is a class like those of `tokenformer_jax.trackers`, and a line here.
"""

from typing import NamedTuple


class TrackerPlace(NamedTuple):
  """The class of a tracker, which is imported only for runs with this tracker."""

  code: str  # its place, as `pkgutil.resolve_name` reads it
  package: str  # the package that it imports
  install: str = ''  # the extra of this package that installs it; '': it is always installed


TRACKERS = {
  'tensorboard': TrackerPlace('tokenformer_jax.trackers.tensorboard:TensorBoard', 'tensorboardX'),
  'wandb': TrackerPlace('tokenformer_jax.trackers.wandb:Wandb', 'wandb', 'wandb'),
  'trackio': TrackerPlace('tokenformer_jax.trackers.wandb:Trackio', 'trackio', 'trackio'),
  'mlflow': TrackerPlace('tokenformer_jax.trackers.mlflow:MLflow', 'mlflow', 'mlflow'),
}
