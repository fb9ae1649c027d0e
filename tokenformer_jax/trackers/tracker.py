"""The interface of a tracker, and the run that it shows."""

import abc
import contextlib
import dataclasses
import json
import pathlib
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from tokenformer_jax.storage import paths

PROJECT = 'tokenformer_jax'  # the project of runs if no environment variable names another
_ID_FILE = 'tracked.json'  # in the work directory
_id_lock = threading.Lock()  # trackers ask for the id on threads of their own


@dataclasses.dataclass(frozen=True)
class About:
  """The description of a run.

  Attributes:
    config: the whole config, the lineage and the size of the model, as nested dicts of JSON.
    parent: the work directory of the run that this one began from, or ''.
    family: the name of the oldest run that this one comes from; its own if there is none.
    tags: words to find the run by.
    notes: lines about the model's origin.
  """

  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parent: str = ''
  family: str = ''
  tags: tuple[str, ...] = ()
  notes: str = ''


@dataclasses.dataclass(frozen=True)
class TrackedRun:
  """A run that begins or goes on.

  Attributes:
    workdir: the work directory.
    directory: a directory on this host for the files of trackers; the work directory if it is one.
    first_step: the number of steps before this start.
    about: the description of the run.
  """

  workdir: paths.Path
  directory: pathlib.Path
  first_step: int
  about: About

  @property
  def name(self) -> str:
    """Return the name of the work directory."""
    return paths.absolute(self.workdir).name

  def id(self) -> str:
    """Return the id by which trackers find the run again; the first call writes it down."""
    with _id_lock:
      path = self.workdir / _ID_FILE
      if not paths.exists(path):
        paths.write(path, json.dumps({'id': uuid.uuid4().hex[:12]}))
      return json.loads(path.read_text())['id']

  def parent_id(self) -> str:
    """Return the id of the parent, or '' if there is none or it cannot be read."""
    with contextlib.suppress(Exception):  # The parent may be on storage that is not here.
      if self.about.parent:
        return json.loads((paths.parse_path(self.about.parent) / _ID_FILE).read_text())['id']
    return ''


class Tracker(abc.ABC):
  """A tracker of a run. One thread makes it and calls its methods, which may take long.

  Attributes:
    where: where to look at the run, for the terminal; '': nothing is printed.
  """

  where: str = ''

  @abc.abstractmethod
  def __init__(self, run: TrackedRun):
    """Begin to track a run, or go on with one that was tracked under its id."""

  @abc.abstractmethod
  def figures(self, step: int, figures: Mapping[str, float]) -> None:
    """Take figures of a step, under flat names such as `train/loss`; some may be NaN."""

  @abc.abstractmethod
  def text(self, step: int, name: str, text: str) -> None:
    """Take a sample of text."""

  @abc.abstractmethod
  def close(self, *, finished: bool) -> None:
    """Hand on all that was taken. `finished`: the run has made all its steps."""
