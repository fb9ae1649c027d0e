"""Weights & Biases, and trackio, which has the same interface.

Keys, accounts, servers and offline modes come from their own environment variables and files.
"""

import contextlib
import html
import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tokenformer_jax.trackers.tracker import PROJECT, TrackedRun, Tracker


class _Alike(Tracker):
  """A tracker with the functions `init`, `log` and `finish` of Weights & Biases."""

  def __init__(self, module: ModuleType, run: TrackedRun, config: Mapping[str, Any], **own: Any):
    """Begin the run, or go on with it; `own` are arguments of `init` for this module."""
    self._module = module
    project = os.environ.get(f'{module.__name__.upper()}_PROJECT') or PROJECT
    with contextlib.redirect_stdout(sys.stderr):  # Standard output is not theirs to print to.
      self._run = module.init(
        project=project, group=run.about.family, config=dict(config), resume='allow', **own
      )

  def text(self, step: int, name: str, text: str) -> None:
    shown = self._module.Html(f'<pre>{html.escape(text)}</pre>')
    self.figures(step, {name: shown})


class Wandb(_Alike):
  """A run of Weights & Biases; its own files are in `wandb/` of the work directory."""

  def __init__(self, run: TrackedRun):
    import wandb  # noqa: PLC0415 (one of two packages)

    settings = wandb.Settings(
      silent=True,  # asks for no key, because the terminal is the run's
      console='off',
      finish_timeout=10,
      reinit='create_new',
    )
    config = {**run.about.config, 'parent': run.parent_id()}
    super().__init__(
      wandb,
      run,
      config,
      id=run.id(),
      name=run.name,
      tags=run.about.tags,
      notes=run.about.notes,
      dir=os.environ.get('WANDB_DIR') or str(run.directory),
      settings=settings,
    )
    # A run that goes on may have changed.
    self._run.config.update(config, allow_val_change=True)
    # Its own steps must ascend, and those of a run that goes on after a crash do not.
    self._run.define_metric('*', step_metric='step')
    offline = self._run.offline
    self.where = f'wandb sync {self._run.settings.sync_dir}' if offline else self._run.url

  def figures(self, step: int, figures: Mapping[str, Any]) -> None:
    self._run.log({'step': step, **figures})

  def close(self, *, finished: bool) -> None:
    if not finished:
      self._run.mark_preempting()
    self._run.finish(exit_code=0 if finished else 1)


class Trackio(_Alike):
  """A run of trackio, in its own directory, or where its environment variables say."""

  def __init__(self, run: TrackedRun):
    about = run.about
    config = {**about.config, 'notes': about.notes, 'tags': about.tags, 'parent': run.parent_id()}
    name = f'{run.name}-{run.id()}'  # It finds a run by its name alone.
    super().__init__(importlib.import_module('trackio'), run, config, name=name, embed=False)

  def figures(self, step: int, figures: Mapping[str, Any]) -> None:
    self._run.log(dict(figures), step=step)

  def close(self, *, finished: bool) -> None:
    del finished
    with contextlib.redirect_stdout(sys.stderr):
      self._run.finish()
