"""The description in a checkpoint: its step, config, lineage, checksums and tokenizer."""

import dataclasses
import secrets
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import groups
from tokenformer_jax.config.section import section
from tokenformer_jax.runs import saved_config
from tokenformer_jax.storage import paths


def new_run_id() -> str:
  """Return a random id."""
  return secrets.token_hex(8)


@section
class Ancestor:
  """One entry of a lineage: a change of a model other than by training."""

  # grow, shrink, merge, remove, slice, scale, freeze or untie; extract in extracted tokens
  action: str
  source: str  # the source's work directory
  step: int  # the source's step
  model: config_lib.Model  # the source's model
  grow: config_lib.GrowConfig  # the options of the action
  updates: int  # the new model's count of optimizer updates when it was created
  # The numbers of the source's groups of parameter tokens that the action took out (remove, slice),
  # took alone (extract), multiplied (scale) or froze (freeze). Empty for actions on whole models.
  groups: str = ''
  factor: float = 1.0  # of scale
  experts: str = ''  # the numbers of the source's experts that remove took out
  # The model FLOPs of the training that led to the source, from its first ancestor on.
  flops: float = 0.0
  tokens: float = 0.0  # the tokens of that training; 0 for images
  branch_of: str = ''  # the work directory of `branch_of` of the source
  run: str = ''  # the source's id: see `Meta.run`

  @property
  def first_step(self) -> int:
    """Return the step at which the new model begins."""
    return 0 if self.grow.step == 'restart' else self.step

  @property
  def adds(self) -> bool:
    """Return whether the action added tokens, neurons, experts or layers."""
    return self.action in ('grow', 'merge')

  @property
  def keeps(self) -> bool:
    """Return whether the action kept all tokens, their moments and the count of updates."""
    return self.action in ('scale', 'freeze')


Lineage = tuple[Ancestor, ...]  # the oldest first


def last_addition(lineage: Lineage) -> tuple[Ancestor | None, Lineage]:
  """Return the last entry that added to a model, if any, and later ones that changed its arrays."""
  later: Lineage = ()
  for entry in reversed(lineage):
    if entry.adds:
      return entry, later
    later = later if entry.keeps else (entry, *later)
  return None, later


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches of the steps after `first`, until the next entry's."""

  first: int  # the number of steps before them
  samples: float  # of a batch; a mean where only the sum of several batches is known
  length: int  # the tokens of a sequence; 1 for images
  sequences: int = 1  # of a sample: two in a pair


@dataclasses.dataclass(frozen=True)
class Seen:
  """The training data that a run has seen."""

  samples: int  # in the order of data/order.py, of the length of the last batch
  digest: str = ''  # the digest of the data; '' without training
  batches: tuple[Batches, ...] = ()  # see runs/batches.py; empty without training


@dataclasses.dataclass(frozen=True)
class TeacherRecord:
  """The teacher that a run is trained with."""

  source: str  # the teacher's run, DIR@STEP
  digest: str  # of the checksums of its parameters, wherever it lies


@dataclasses.dataclass(frozen=True)
class Meta:
  """The description in a checkpoint."""

  step: int
  config: config_lib.Config  # the config of the run that wrote it, with every size filled in
  tokenizer: dict[str, Any]  # the meaning of the model's ids, from `Task.vocabulary`
  lineage: Lineage = ()
  # `model`; `params` for a model without training, so that the rest of its state is zero; or
  # `added_tokens` for the tokens of the last growth alone.
  contents: str = 'model'
  seen: Seen = Seen(0)
  teacher: TeacherRecord | None = None
  # The finite losses of the steps since the last line of training figures.
  losses: tuple[float, ...] = ()
  # The id of the run, which says whether two runs share parameter tokens, wherever they lie. Copies
  # of a run have its id, and so has a branch that decays from it. `Checkpoints.save` makes one for
  # ''.
  run: str = ''
  # The `model_type` of the folder of transformers that the model, or its ancestor, came from.
  family: str = ''
  updates: int = 0  # updates by the optimizer: `step` minus the skipped updates
  # The checksums of the arrays by path in the state, which `Checkpoints.save` computes.
  checksums: dict[str, int] = dataclasses.field(default_factory=dict)

  def has(self, entry: str) -> bool:
    """Return whether the state in the checkpoint has an entry such as `params`."""
    return any(path.startswith(f'{entry}/') for path in self.checksums)


def to_json(meta: Meta) -> dict[str, Any]:
  """Return a description without its tokenizer, which is an item of its own."""
  plain = ('step', 'contents', 'losses', 'run', 'family', 'updates', 'checksums')
  return {
    'format': saved_config.FORMAT,
    'config': config_lib.to_json(meta.config),
    'lineage': [config_lib.to_json(ancestor) for ancestor in meta.lineage],
    'seen': dataclasses.asdict(meta.seen),
    'teacher': meta.teacher and dataclasses.asdict(meta.teacher),
    **{name: getattr(meta, name) for name in plain},
  }


def from_json(stored: dict[str, Any], tokenizer: dict[str, Any], where: str) -> Meta:
  """Return the description in a checkpoint from its items `meta` (stored) and `tokenizer`."""
  saved_config.check_format(stored['format'], where)
  config = saved_config.parse(config_lib.Config, stored['config'], where)
  seen = stored['seen']
  # Earlier versions recorded no sequences: take those of the config, whose steps a run counts.
  unrecorded = {'sequences': config.data.sequences}
  batches = tuple(Batches(**unrecorded | entry) for entry in seen['batches'])
  return Meta(
    step=stored['step'],
    config=saved_config.without_programs(config),
    tokenizer=tokenizer,
    lineage=tuple(saved_config.parse(Ancestor, entry, where) for entry in stored['lineage']),
    contents=stored['contents'],
    seen=Seen(**{**seen, 'batches': batches}),
    teacher=TeacherRecord(**stored['teacher']) if stored['teacher'] else None,
    losses=tuple(stored.get('losses', ())),
    run=stored['run'],
    family=stored.get('family', ''),
    updates=stored['updates'],
    checksums=stored['checksums'],
  )


def with_births(meta: Meta, directory: paths.Path) -> Meta:
  """Return the description of a run to save: its unborn parameter tokens were born in it."""
  step = meta.lineage[-1].first_step if meta.lineage else 0
  path = str(paths.absolute(directory))
  model = groups.with_births(meta.config.model, meta.run, path, step)
  return dataclasses.replace(meta, config=dataclasses.replace(meta.config, model=model))


def branch_of(meta: Meta) -> str:
  """Return the work directory of the run that a run decays from (`train.decay_from`), or ''.

  A branch continues the model and the lineage of that run, and so its tokens.
  """
  config = meta.config
  if not (config.init_from and config.train.decay_from):
    return ''
  source = str(paths.absolute(paths.split_source(config.init_from)[0]))
  return '' if meta.lineage and meta.lineage[-1].source == source else source
