"""MLflow: a run on a server, or in the files that its environment variables name."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, Run, RunStatus, RunTag

from tokenformer_jax.trackers.tracker import PROJECT, TrackedRun, Tracker

_ID = 'tokenformer_jax.id'  # the tag that finds a run again
_AT_ONCE, _LONGEST = 100, 500  # parameters of a request; characters of a value


class MLflow(Tracker):
  """A run of MLflow; a run that has grown is shown below its parent."""

  def __init__(self, run: TrackedRun):
    self._client = mlflow.MlflowClient()
    name = os.environ.get('MLFLOW_EXPERIMENT_NAME') or PROJECT
    experiment = self._client.get_experiment_by_name(name)
    self._experiment = (
      experiment.experiment_id if experiment else self._client.create_experiment(name)
    )
    known = self._find(run.id())
    if known is None:
      tags = {_ID: run.id(), 'family': run.about.family, 'mlflow.note.content': run.about.notes}
      if (parent := self._find(run.parent_id())) is not None:
        tags['mlflow.parentRunId'] = parent.info.run_id
      tags |= dict.fromkeys(run.about.tags, 'yes')
      known = self._client.create_run(self._experiment, run_name=run.name, tags=tags)
    self._id = known.info.run_id
    self._client.update_run(self._id, RunStatus.to_string(RunStatus.RUNNING))
    self._parameters(dict(_flat(run.about.config)), known.data.params, run.first_step)
    self._client.log_dict(self._id, dict(run.about.config), f'config/step_{run.first_step:08}.json')
    uri = re.sub('//[^/@]*@', '//', self._client.tracking_uri)  # without a password
    self.where = f'run {self._id} at {uri}'

  def figures(self, step: int, figures: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    metrics = [Metric(name, value, now, step) for name, value in figures.items()]
    self._client.log_batch(self._id, metrics=metrics)

  def text(self, step: int, name: str, text: str) -> None:
    self._client.log_text(self._id, text, f'{name}/step_{step:08}.txt')

  def close(self, *, finished: bool) -> None:
    status = RunStatus.FINISHED if finished else RunStatus.KILLED
    self._client.set_terminated(self._id, RunStatus.to_string(status))

  def _find(self, identity: str) -> Run | None:
    """Return the run of the experiment with this id of ours, or None."""
    if not identity:
      return None
    runs = self._client.search_runs([self._experiment], f"tags.`{_ID}` = '{identity}'")
    return runs[0] if runs else None

  def _parameters(self, now: dict[str, str], known: Mapping[str, str], step: int) -> None:
    """Write new parameters. A changed one cannot be written again, so a tag has the change."""
    changes = [RunTag(f'{key} from step {step} on', now[key]) for key in known.keys() & now]
    changes = [tag for tag in changes if tag.value != known[tag.key.partition(' ')[0]]]
    new = [Param(key, value) for key, value in now.items() if key not in known]
    for first in range(0, len(new), _AT_ONCE):
      self._client.log_batch(self._id, params=new[first : first + _AT_ONCE])
    self._client.log_batch(self._id, tags=changes)


def _flat(values: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, str]]:
  """Yield the values of nested dicts as text, by dotted path."""
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f'{prefix}{name}.')
    else:
      text = value if isinstance(value, str) else json.dumps(value)
      yield f'{prefix}{name}', text[:_LONGEST]
