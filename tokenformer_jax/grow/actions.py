"""The actions of growth: the table `ACTIONS` serves the command `grow`, its help, and `Run`.

The function of an action takes a `Job`; its keyword-only parameters are the arguments of the
action. It checks all it can before it reads an array, and returns the step of the new run, or None
after a dry run. Messages name arguments as flags; `arguments.checked` names them as in Python.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.config import GrowConfig, ModelConfig, conditions, named_counts, pattentions
from tokenformer_jax.config import groups as choices
from tokenformer_jax.config.groups import Choice, as_text
from tokenformer_jax.config.section import Count, Key
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files, larger, plan, subsets, verify
from tokenformer_jax.grow import groups as groups_lib
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.job import Job
from tokenformer_jax.grow.larger import Counts
from tokenformer_jax.grow.steps import experts as experts_lib
from tokenformer_jax.grow.steps import matrices as matrices_lib
from tokenformer_jax.grow.steps.remove import ScaleGroups, TakeGroups
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, lookup
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch

Numbers = Sequence[Count]  # of groups or experts, from 1 on
Examples = Annotated[int, Key(least=1, most=2**16)]


def extract(job: Job, *, groups: Numbers | None = None) -> None:
  """Write only the tokens of some groups, or the tokens that the last growth or merge added.

  Raises:
    UserError: the run has not grown, a projection has no other group, or the target cannot be
      written.
  """
  meta = job.meta
  numbers = () if groups is None else _group_numbers(job.model, groups)
  lineage, model = subsets.extraction(meta, job.directory, numbers)
  params = files.read(job.checkpoints, meta, job.mesh)['params']
  files.write(
    job.target,
    {'params': subsets.extract(params, job.model, lineage[-1].model, numbers)},
    job.new_config(model, meta.config.grow),
    meta.tokenizer,
    lineage=lineage,
    contents='added_tokens',
    step=meta.step,
  )
  which = f'groups {as_text(numbers)}' if numbers else 'the added tokens'
  messages.say(f'wrote {job.target}: {which} of {job.directory}')


def remove(
  job: Job, *, groups: Numbers | None = None, experts: Numbers | None = None
) -> int | None:
  """Take out groups, experts, or what the last growth or merge added; the others move up.

  Raises:
    UserError: there is no such group or expert, too few would stay, nothing was added, or the added
      tokens cannot be told from the old ones.
  """
  if groups is not None and experts is not None:
    raise UserError('--groups and --experts both say what to take out; give one of them')
  if groups is not None:
    numbers = _group_numbers(job.model, groups)
    return _choose(job, 'remove', choices.without(numbers), numbers)
  if experts is not None:
    return _remove_experts(job, experts)
  last = subsets.last_addition(job.meta, job.directory)
  return job.rewrite('remove', last.model, plan.plan_removal(last, job.model))


def _remove_experts(job: Job, experts: Numbers) -> int | None:
  numbers = choices.in_order(experts, '--experts', 'experts')
  after = experts_lib.without(job.model, numbers, '--experts')
  kept = functools.partial(lookup, experts_lib.all_but(job.model, numbers))
  steps = (experts_lib.TakeExperts(job.model, after, data=kept),)
  return job.rewrite('remove', after, steps, experts=as_text(numbers))


def keep_first(job: Job, *, groups: Count) -> int | None:
  """Keep the first groups of each projection.

  Raises:
    UserError: no projection has more groups.
  """
  _check_has_tokens(job.model)
  most = choices.most_groups(job.model)
  if most == 1:
    raise UserError('every projection of this model has one group; there is nothing to take out')
  if groups >= most:
    raise UserError(
      f'--groups is {groups}, the number of groups to keep; it must be from 1 to {most - 1}'
    )
  return _choose(job, 'slice', choices.first(groups), range(groups + 1, most + 1))


def _choose(job: Job, action: str, choice: Choice, gone: Sequence[int]) -> int | None:
  """Write the run with a choice of its groups; `gone` are the numbers of the others."""
  model, optim = job.model, job.optim
  frozen = choices.choose_frozen(optim, model, choice)
  after = choices.choose(model, choice)
  return job.rewrite(
    action,
    after,
    (TakeGroups(model, after, choice),),
    optim=dataclasses.replace(optim, frozen_groups=frozen),
    groups=as_text(gone),
  )


def scale(job: Job, *, groups: Numbers, factor: float) -> int | None:
  """Multiply the values of groups, in the parameters and their average; moments stay.

  Raises:
    UserError: there is no such group.
  """
  model = job.model
  numbers = _group_numbers(model, groups)

  steps = (ScaleGroups(model, model, numbers, factor),)
  return job.rewrite('scale', model, steps, groups=as_text(numbers), factor=factor)


def freeze(job: Job, *, groups: Numbers) -> int | None:
  """Write a run that trains all groups of tokens but some.

  Raises:
    UserError: there is no such group.
  """
  model = job.model
  _check_has_tokens(model)
  text = as_text(_group_numbers(model, groups) if groups else ())
  optim = dataclasses.replace(job.optim, frozen_groups=text)
  none = range(0)
  return job.rewrite('freeze', model, (), measured=none, optim=optim, groups=text)


def shrink(
  job: Job,
  *,
  param_tokens: Counts | None = None,
  experts: Count | Counts | None = None,
  examples: Examples = 16,
) -> int | None:
  """Keep the parameter tokens that matter most for held-out examples, or the most used experts.

  Raises:
    UserError: the counts are not smaller, or there is no room.
  """
  model = job.model
  if (param_tokens is None) == (experts is None):
    raise UserError('shrink needs either --param_tokens or --experts, the numbers to keep')
  if experts is not None:
    return _shrink_experts(job, experts, examples)
  after = grown_model(model, named_counts(model, param_tokens, '--param_tokens'), job.config)
  subsets.check_smaller(model, after)

  def steps(params: Params) -> Steps:
    batch, name = job.held_out(examples)
    task = verify.exact_task(job.meta.config, model)
    messages.say(f'importance of a token: mean over examples of |⟨value, ∂loss/∂value⟩|, on {name}')
    return subsets.shrink(params, task, after, batch)

  others = range(examples, 2 * examples)
  return job.rewrite('shrink', after, steps, measured=others, advice=True)


def _shrink_experts(job: Job, experts: int | Counts, examples: int) -> int | None:
  counts = experts_lib.named_counts(job.model, experts, '--experts', dense=False)
  after = experts_lib.smaller(job.model, counts, '--experts=N')

  def steps(params: Params) -> Steps:
    batch, name = job.held_out(examples)
    kept = _most_used(job, after, params, batch, name)
    return (experts_lib.TakeExperts(job.model, after, data=functools.partial(lookup, kept)),)

  others = range(examples, examples + 1)
  return job.rewrite('shrink', after, steps, measured=others)


def _most_used(job: Job, after: ModelConfig, params: Params, batch: Batch, name: str) -> Params:
  """Return the experts to keep; report how often tokens choose the others."""
  info = models.define(job.model).info
  task = verify.exact_task(job.meta.config, experts_lib.balanced_by_bias(job.model))
  loads = jax.jit(lambda params, batch: experts_lib.loads(task, params, batch))(params, batch)
  kept = experts_lib.most_used(loads, info, models.define(after).abstract)
  shares = [
    jnp.sum(jnp.take_along_axis(load, numbers, axis=-1), axis=-1)
    for load, numbers in zip(jax.tree.leaves(loads), jax.tree.leaves(kept), strict=True)
    if load.ndim
  ]
  lost = 1 - float(jnp.mean(jnp.concatenate(shares)))
  messages.say(f'the experts that go have {lost:.1%} of the choices of {name}')
  return kept


def group_table(source: str) -> str:
  """Return a table of the groups of a run, DIR or DIR@STEP: see `groups.render`.

  Raises:
    UserError: there is no such run, or its model has no parameter tokens.
  """
  directory, step = paths.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
  _check_has_tokens(meta.config.model)
  return groups_lib.render(meta, directory)


def _group_numbers(model: ModelConfig, groups: Numbers) -> tuple[int, ...]:
  """Return numbers of groups of a model, at least one, in rising order."""
  _check_has_tokens(model)
  numbers = choices.in_order(groups, '--groups')
  choices.check_numbers(choices.most_groups(model), numbers, '--groups')
  return numbers


def _check_has_tokens(model: ModelConfig) -> None:
  if not pattentions(model):
    raise UserError('this model is a Transformer, which has no groups of parameter tokens')


def to_tokens(job: Job, *, matrices: str | None = None) -> int | None:
  """Turn matrices into parameter tokens that compute the same, up to rounding.

  Raises:
    UserError: a matrix cannot be tokens, or there is no room.
  """
  model = job.model
  after = matrices_lib.wanted(model, matrices)
  messages.say(
    'the same up to rounding: GELU(z) − GELU(−z) = z makes two tokens of each input of a matrix, '
    "and a neuron of an MLP is a token; the optimizer's moments of the pairs start at zero"
  )
  steps = (matrices_lib.MatricesToTokens(model, after),)
  return job.rewrite('as_tokens', after, steps, advice=True)


class Action(NamedTuple):
  """A line of the table.

  Attributes:
    summary: what the action does, for `--help`.
    function: does it.
    keys: the keys of `GrowConfig` that it heeds; an action with some has a dry run.
    when: by argument or key, the condition on arguments under which it has an effect
      (`config.conditions`); the others always have one.
  """

  summary: str
  function: Callable[..., Any]
  keys: Sequence[str] = ()
  when: Mapping[str, str] = MappingProxyType({})

  @property
  def makes_run(self) -> bool:
    """Whether the action writes a target; the others take a source, DIR[@STEP], and return text."""
    return 'job' in inspect.signature(self.function).parameters

  @property
  def arguments(self) -> dict[str, inspect.Parameter]:
    """The arguments by name, with types and defaults."""
    parameters = inspect.signature(self.function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

  def run(self, job: Job, **given: Any) -> int | None:
    """Run the action; arguments that are not given have their defaults.

    Raises:
      UserError: an argument or key has no effect; or see the function.
    """
    values = {**vars(job.config), **dict.fromkeys(self.arguments), **given}
    for name, condition in self.when.items():
      if values[name] and not conditions.holds(condition, values):
        needed = conditions.spell(condition, '--{}'.format, '--{}={}'.format)
        raise UserError(f'--{name} has an effect only {needed}; leave it out')
    return self.function(job, **given)


_KEPT = ('moments', 'step')
_OF_EXPERTS = {'expert_tokens': 'experts', 'top_k': 'experts'}
ACTIONS = {
  'grow': Action(
    'make a larger model',
    larger.grow,
    tuple(f.name for f in dataclasses.fields(GrowConfig)),
    _OF_EXPERTS,
  ),
  'extract': Action(
    'write only the tokens that the last growth added, or those of --groups=2', extract
  ),
  'merge': Action(
    'append the tokens of --added, from extract or another run, to those of --source',
    larger.merge,
    ('scale', *_KEPT),
  ),
  'remove': Action(
    'take out what the last growth or merge added, or --groups=2,3, or --experts=2,3',
    remove,
    _KEPT,
  ),
  'shrink': Action(
    'keep the most important tokens (--param_tokens), or the most used experts (--experts=N)',
    shrink,
    ('scale', *_KEPT),
    {'scale': 'param_tokens'},
  ),
  'groups': Action(
    'print a table of the groups and of where they come from; needs no --target', group_table
  ),
  'slice': Action('keep the first --groups=N groups of each projection', keep_first, _KEPT),
  'scale': Action('multiply the values of --groups=2 by --factor=0.5', scale),
  'as_tokens': Action('turn matrices into tokens (--matrices=qkv,ffn; default: all)', to_tokens),
  'freeze': Action('train all groups but --groups=1,2 from here on; --groups= trains all', freeze),
}

# The meaning of each argument and key as a flag of the command, for `--help`.
MEANINGS = {
  'param_tokens': 'New counts: qkv=N,proj=N,ffn=N; NAME.ffn=N for one kind.',
  'layers': 'The new number of layers, all of the rows that there are.',
  'pattern': "The new pattern of layers, such as 'local*10 full'.",
  'width': 'For a Transformer: the new width.',
  'heads': 'For a Transformer: the new number of heads.',
  'ffn_width': 'For a Transformer: the new feed-forward width.',
  'experts': 'How many, N or NAME=N; for remove: which, as 2,3.',
  'expert_tokens': 'Tokens of each new expert; default: as the Pattention has.',
  'top_k': 'The experts of a token; default: as before, or 1 or 2.',
  'added': 'The run whose tokens are appended, DIR[@STEP].',
  'groups': 'As 2,3; for slice: how many.',
  'factor': 'The factor of the values.',
  'matrices': 'Names, as qkv,ffn.',
  'examples': 'Calibration sequences or images.',
  'method': 'How new weights are made.',
  'scale': 'Reference counts.',
  'new_keys': 'The keys of new tokens.',
  'new_values': 'The values of new tokens.',
  'new_score': 'Of a new group.',
  'moments': "Optimizer's moments.",
  'step': 'Steps made.',
  'noise': 'Noise on copies, in units of RMS.',
  'seed': 'Seed of the draws.',
  'rate': 'Factor on the learning rate; 0: by size.',
  'place': 'Where layers go.',
}
# The arguments of `grow` that ask for each change of `config.sections.CHANGES`.
ASK_FOR = {
  'more_tokens': 'param_tokens',
  'wider': 'width or heads or ffn_width',
  'more_experts': 'experts',
  'deeper': 'layers or pattern',
}
