"""Describe a run for its trackers: the config, and where the model comes from."""

import pathlib
from collections.abc import Iterator
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import ModelConfig
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.storage import paths
from tokenformer_jax.trackers.tracker import About
from tokenformer_jax.training.prepare import PreparedRun


def about(run: PreparedRun) -> About:
  """Return the description of a run for its trackers."""
  config, lineage = run.config, run.origin.lineage
  born = list(_births(lineage, config.model))
  began = str(paths.absolute(paths.split_source(config.init_from)[0])) if config.init_from else ''
  parent = began or (lineage[-1].source if lineage else '')
  oldest = lineage[0].source if lineage else parent or str(paths.absolute(run.workdir))
  notes = [f'{one["action"]} of {one["source"]}@{one["step"]}: {one["change"]}' for one in born]
  if began and not (lineage and lineage[-1].source == began):
    notes.append(f'goes on from {config.init_from}')
  return About(
    config={
      **config_lib.to_json(config),
      'lineage': born,
      'parameters': run.task.definition.count,
      'devices': f'{run.mesh.size} of {run.mesh.devices.flat[0].device_kind}',
    },
    parent=parent,
    family=pathlib.PurePosixPath(oldest).name,
    tags=(config.model.kind, *(['grown'] if lineage else ())),
    notes='\n'.join(notes) or 'from scratch',
  )


def _births(lineage: tuple[Ancestor, ...], model: ModelConfig) -> Iterator[dict[str, Any]]:
  """Yield each entry of a lineage, which leads to a model, as JSON."""
  following = [*(one.model for one in lineage), model][1:]
  for one, became in zip(lineage, following, strict=True):
    changes = config_lib.differences(became, one.model, 'model.')
    yield {
      'action': one.action,
      'source': one.source,
      'step': one.step,
      'method': one.grow.method.kind,
      'change': '; '.join(f'{path}: {old} -> {new}' for path, new, old in changes) or 'none',
    }
