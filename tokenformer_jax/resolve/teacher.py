"""Find the teacher of a run (`config.distill`), check that it fits, and read its parameters.

A run keeps its teacher: a checkpoint records the teacher's run, step and a digest of its
parameters, and a run that goes on from there must have the same parameters as its teacher.
"""

import dataclasses
import functools
import hashlib
import json

from jax.sharding import Mesh

from tokenformer_jax.config import Config
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.model import flops, models
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.origin import Origin
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta, TeacherRecord
from tokenformer_jax.storage import paths


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
  """A checkpoint that a run learns from."""

  record: TeacherRecord  # for the run's checkpoints
  source: checkpoint.Source

  @property
  def meta(self) -> Meta:
    """The description of the teacher's checkpoint."""
    return self.source.meta

  @property
  def definition(self) -> Definition:
    """The teacher's model, for its metadata; a run computes `Task.teacher`."""
    return models.define(self.meta.config.model)

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """The tokenizer that the teacher was trained with."""
    return tokenizers.from_json(self.meta.tokenizer)

  def read(self, mesh: Mesh) -> Params:
    """Read the parameters once, sharded over the mesh by the rules of all parameters."""
    shardings = sharding.tree_shardings(mesh, self.definition.axes)
    abstract = {'params': sharding.with_shardings(self.definition.abstract, shardings)}
    return self.source.restore(abstract)['params']

  def step_flops(self, config: Config) -> float:
    """Count the FLOPs of the teacher's forward pass in a step of a run over all devices."""
    length = config.data.sequence_length
    sequences = config.data.batch_size * config.data.sequences
    return sequences * length * flops.forward_flops(self.meta.config.model, length)

  def description(self, config: Config) -> str:
    """Return a line about the teacher for the start of a run."""
    meta, own = self.meta, ''
    if meta.contents == 'model' and meta.step < meta.config.train.steps:
      own = f', which has made {meta.step} of its {meta.config.train.steps} steps'
    if not config.distill.weight:
      return f'the teacher {self.record.source}{own} has the weight 0: no step computes it'
    teacher, student = self.step_flops(config) / 1e12, flops.step_flops(config) / 1e12
    use = 'comparing with' if config.data.has_pairs else 'learning from'
    return (
      f'{use} {self.record.source}{own}: {self.definition.count:,} parameters, '
      f'{teacher:,.3g} TFLOP a step, and {student:,.3g} of the student'
    )

  def complete(self, config: Config, origin: Origin) -> Config:
    """Fill in the step of the teacher, and its vocabulary size if the run has none of its own."""
    distill = dataclasses.replace(config.distill, teacher=self.record.source)
    model = config.model
    if origin.model is None and not model.vocab_size:
      model = dataclasses.replace(model, vocab_size=self.meta.config.model.vocab_size)
    return dataclasses.replace(config, distill=distill, model=model)

  def check_fits(self, config: Config, mesh: Mesh) -> None:
    """Check that the teacher fits a run: its model, with every size filled in, data and mesh."""
    key = f'config.distill.teacher={self.record.source}'
    student, model = config.model, self.meta.config.model
    if model.vocab_size != student.vocab_size:
      raise UserError(
        f'config.model.vocab_size is {student.vocab_size}, and {key} has {model.vocab_size}; their '
        f'probabilities are compared id by id, so set it to {model.vocab_size}'
      )
    length = config.data.sequence_length
    if model.position_embedding == 'learned' and model.max_length < length:
      raise UserError(
        f'config.data.sequence_length is {length}, and {key} has learned positions for '
        f'{model.max_length} tokens; take at most that'
      )
    try:
      sharding.check_divides(mesh, self.definition.abstract, self.definition.axes)
      sharding.check_model(model, mesh)
    except UserError as error:
      raise UserError(f'{key} cannot be split over the mesh: {error}') from error


def find(config: Config, origin: Origin) -> Teacher | None:
  """Open the teacher of a run that has one, before any data is read; sizes may be open.

  It is the teacher that the run's own checkpoint was trained with, if there is one, and has the
  tokenizer of the run.
  """
  kept = origin.own.teacher if origin.own else None
  source = config.distill.teacher
  other = (
    f'or start another run from it with another teacher or none ({arg.workdir}=NEW_DIR '
    f'{arg.config}.init_from=DIR)'
  )
  if not source:
    if kept is None:
      return None
    raise UserError(
      f'{origin.where} was trained with the teacher {kept.source}, and config.distill.teacher is '
      f'empty; set it to that, {other}'
    )
  try:
    directory, step = paths.split_source(source)
    if kept and step is None and kept.source.startswith(f'{directory}@'):
      named = kept.source  # A later checkpoint of it is another teacher.
    else:
      named = source
    opened = checkpoint.open_source(named, checkpoint.check_is_language_model)
  except UserError as error:
    needed = f'; {origin.where} was trained with it: put it back, {other}' if kept else ''
    raise UserError(f'config.distill.teacher={source}: {error}{needed}') from error
  record = TeacherRecord(f'{directory}@{opened.meta.step}', _digest(opened.meta))
  teacher = Teacher(record, opened)
  if kept and kept.digest != record.digest:
    raise UserError(
      f'config.distill.teacher={source} has other parameters than {kept.source}, the teacher that '
      f'{origin.where} was trained with; name that one, {other}'
    )
  _check_tokenizer(config, origin, teacher)
  return teacher


def _digest(meta: Meta) -> str:
  """Return a digest of the checksums of a checkpoint's parameters."""
  sums = {path: value for path, value in meta.checksums.items() if path.startswith('params/')}
  return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def _check_tokenizer(config: Config, origin: Origin, teacher: Teacher) -> None:
  """Check that the ids of the run stand for the same text as those of the teacher."""
  ours, spec = config.data.tokenizer, teacher.meta.config.data.tokenizer
  if origin.vocabulary == teacher.meta.tokenizer:
    return
  trained = teacher.tokenizer
  if origin.tokenizer is not None:
    same = origin.tokenizer.fingerprint == trained.fingerprint
  else:
    same = tokenizers.names_same(ours, spec, trained)
  if not same:
    raise UserError(
      f'config.data.tokenizer is {ours!r}, but config.distill.teacher={config.distill.teacher} was '
      f'trained with another tokenizer ({spec!r}, fingerprint {trained.fingerprint}), whose ids '
      'stand for other text; a student needs the tokenizer of its teacher'
    )
