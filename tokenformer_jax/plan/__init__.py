"""Plan a run: whether it fits on a topology and how fast it will be, without the hardware.

chips.py        published figures of each chip
gpu.py          compile for GPUs without one; count the kernels of a program
topology.py     names such as `v5p:4x4x4`, and their devices
program.py      the training step, compiled for those devices; its memory
layout_dump.py  the compiler's intermediate result, available long before the end
hlo.py trip_counts.py  parser for the program's text; how often every instruction runs
schedule.py     the compiler's schedule of every operation
kept_schedules.py  those of earlier plans, in the user's cache
gpu_times.py    the time of every kernel of a GPU
costs.py        FLOPs, operations and collectives of a step (matmuls.py, elementwise.py,
                memory_traffic.py, kernel_costs.py, operations.py, equal_operations.py,
                collectives.py)
overlap.py      which collectives run behind computation
estimate.py     the plan: times, MFU, hours
stages.py       a run whose batches change over steps
table.py        the plan as text
tune.py         search for the fastest of several meshes
largest_batch.py  search for the largest batch that fits
breakdown.py    where the step goes
chain.py        growth chains
"""

import sys
import types
from typing import TYPE_CHECKING, Any

from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Count
from tokenformer_jax.config.file import from_argument
from tokenformer_jax.config.section import Bool, Str

if TYPE_CHECKING:
  from tokenformer_jax.plan.estimate import Plan
  from tokenformer_jax.plan.stages import StagedPlan


@arguments.checked
def plan(
  config: Any, topology: Str, *, slices: Count = 1, quick: Bool = False
) -> 'Plan | StagedPlan':
  """Plan a run on devices that this machine need not have.

    print(tokenformer_jax.plan('lm_pile:1_5b', 'v5p:4x4x4', quick=True).summary)

  `config` is as for `tokenformer_jax.train`, `topology` is CHIP:SHAPE, such as `v5e:4x4`, or for
  GPUs `h200:8`. `quick` stops before code is generated for TPUs: much faster, without the schedule.
  The result has memory in bytes, times in seconds and MFU: see `estimate.Plan`, or
  `stages.StagedPlan` for a run whose batches change over steps.
  """
  from tokenformer_jax.plan import estimate, stages  # noqa: PLC0415
  from tokenformer_jax.plan.topology import parse  # noqa: PLC0415
  from tokenformer_jax.steps.fit import DoesNotFitError  # noqa: PLC0415

  resolved, on = from_argument(config), parse(topology, slices)
  if resolved.data.has_stages:
    return stages.plan_stages(resolved, on, quick=quick)
  try:
    return estimate.plan(resolved, on, quick=quick)
  except DoesNotFitError as error:
    raise estimate.advice(resolved, error, on) from error


class _Package(types.ModuleType):
  """A module that can be called, because importing any file of it binds `tokenformer_jax.plan`."""

  __call__ = staticmethod(plan)


sys.modules[__name__].__class__ = _Package
