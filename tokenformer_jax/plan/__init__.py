"""Planning: whether a run fits on a topology and how fast it will be, before there is one.

chips.py        what is published of chips
topology.py     `v5p:4x4x4`, and its devices
program.py      the training step, compiled for them; its memory
early.py        what the compiler has settled after seconds
hlo.py walk.py  the program's text taken apart; how often every instruction runs
costs.py        cycles, FLOPs and collectives of a step (matmuls.py, elementwise.py, collectives.py)
formulas.py     the same by formula, for GPUs
estimate.py     the plan: times, MFU, hours
table.py        as text
sweep.py        the fastest of several
chain.py        growth chains
command.py      `python -m tokenformer_jax.plan`
"""

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tokenformer_jax.plan.estimate import Plan


class _Package(types.ModuleType):
  """This package, as a function: importing any file of it binds the name `tokenformer_jax.plan`."""

  def __call__(self, config: Any, topology: str, *, slices: int = 1, quick: bool = False) -> 'Plan':
    """Say whether a run fits on devices that are not here, and what it takes.

      print(tokenformer_jax.plan('lm_pile:1_5b', 'v5p:4x4x4', quick=True).summary)

    Args:
      config: as for `tokenformer_jax.train`.
      topology: CHIP:SHAPE, such as `v5e:4x4` or `gpu-h100:8`.
      slices: how many of them.
      quick: seconds and not minutes: no cycles.

    Returns:
      Memory in bytes, times in seconds and MFU: see `estimate.Plan`.

    Raises:
      UserError: it does not fit, a value does not fit, or libtpu is missing.
    """
    from tokenformer_jax.configure import resolve  # noqa: PLC0415
    from tokenformer_jax.plan import estimate, program  # noqa: PLC0415
    from tokenformer_jax.plan.topology import parse  # noqa: PLC0415

    resolved, on = resolve(config), parse(topology, slices)
    try:
      return estimate.plan(resolved, on, quick=quick)
    except program.DoesNotFitError as error:
      raise estimate.advice(resolved, error, on) from error


sys.modules[__name__].__class__ = _Package
