"""Divide a training step into rows: where its time goes, and what bounds each row.

An operation belongs to a row by its JAX names, which the model's named scopes belong to, and by
what is in it. A fusion of a product with other work counts as a product.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.plan.costs import Costs
from tokenformer_jax.plan.estimate import Plan
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.overlap import Collective
from tokenformer_jax.plan.table import Row, ms, percent

WAITS = 'collectives, exposed'
_NAMED = 3  # operations that run beside a collective and are named
_DEAREST = 12  # operations that are listed one by one


def _scope(name: str) -> Callable[[Operation], bool]:
  """Return whether an operation, or for a fusion without one its first operation, has a scope."""
  pattern = re.compile(rf'[/(]{name}[)/]')
  return lambda operation: any(map(pattern.search, operation.scopes[:1]))


def _has_product(name: str) -> Callable[[Operation], bool]:
  """Return whether an operation, or a product in it, has a scope."""
  pattern = re.compile(rf'[/(]{name}[)/]')
  return lambda one: any(map(pattern.search, (*one.scopes[:1], *one.products)))


def _is_optimizer(operation: Operation) -> bool:
  own = [scope for scope in operation.scopes if scope.startswith('jit(')]
  return bool(own) and not any('jvp' in scope for scope in own)


def _is_copy(operation: Operation) -> bool:
  return operation.opcode in _COPIES or operation.holds <= _COPIES


_COPIES = frozenset(
  (
    *('copy', 'reshape', 'transpose', 'convert', 'broadcast', 'pad', 'slice', 'concatenate'),
    *('dynamic-slice', 'dynamic-update-slice', 'bitcast', 'parameter', 'constant', 'tuple'),
    *('get-tuple-element', 'fusion', 'iota'),
  )
)
# Rows with the condition of an operation, the first that holds.
_ROWS: tuple[tuple[str, Callable[[Operation], bool]], ...] = (
  ('attention', lambda o: o.opcode == 'attention'),  # of a GPU
  ('attention', lambda o: o.opcode == 'custom-call' and 'splash' in o.name),
  ('other kernels', lambda o: o.opcode == 'custom-call'),
  ('head and loss', _has_product('head_and_loss')),
  ('rotary positions', _has_product('rotary')),
  ('scores, backward: products with the slope of GELU', lambda o: _is_score(o) and _has_slope(o)),
  ('scores, forward: products with GELU', lambda o: _is_score(o)),
  ('other products', lambda o: bool(o.products)),
  ('norms', _scope('norm')),
  ('optimizer', _is_optimizer),
  ('attention', lambda o: any('splash' in scope for scope in o.scopes[:1])),
  ('embedding', lambda o: any('jit(_take)' in scope for scope in o.scopes[:1])),
  ('copies and casts', _is_copy),
)
_REST = 'elementwise and the rest'


def _is_score(operation: Operation) -> bool:
  return bool(operation.products) and not operation.holds.isdisjoint(('erf', 'tanh'))


def _has_slope(operation: Operation) -> bool:
  """Return whether a fusion differentiates GELU; the slope of the exact one has an exponential."""
  scopes = [scope for scope in operation.products if 'transpose(' in scope]
  is_gradient = bool(scopes) and 'rematted_computation' not in scopes[0]
  return is_gradient and 'exponential' in operation.holds


@dataclasses.dataclass
class Share:
  """A row of the breakdown: seconds of a step on a device, and the bounds of their sum."""

  name: str
  count: int = 0
  seconds: float = 0.0
  matrix: float = 0.0
  vector: float = 0.0
  memory: float = 0.0

  @property
  def limit(self) -> str:
    """Return the unit with the largest bound, or what else takes the time."""
    bounds = {'matrix': self.matrix, 'vector': self.vector, 'memory': self.memory}
    name = max(bounds, key=bounds.__getitem__)
    return name if bounds[name] > 0.7 * self.seconds else f'order ({name})'


def row_of(operation: Operation) -> str:
  """Return the row of an operation."""
  return next((name for name, belongs in _ROWS if belongs(operation)), _REST)


def shares(costs: Costs) -> list[Share]:
  """Return the rows, the longest first, and last the waits for collectives.

  Their seconds sum to `costs.ordered_seconds`.
  """
  rows: dict[str, Share] = {}
  for operation in costs.operations:
    name, times = row_of(operation), operation.times
    row = rows.setdefault(name, Share(name))
    row.count += times
    row.seconds += times * operation.seconds
    row.matrix += times * operation.matrix
    row.vector += times * operation.vector
    row.memory += times * operation.memory
  count = sum(one.times for one in costs.collectives)
  waits = Share(WAITS, count, _total(costs.collectives, 'exposed'))
  return [*sorted(rows.values(), key=lambda row: -row.seconds), waits]


def render(plan: Plan) -> str:
  """Return the tables: rows of the step, its longest operations, and its collectives."""
  costs = plan.costs
  tables = [_step(plan), _operations(costs)]
  if costs.collectives:
    tables.append(_collectives(costs))
  return '\n\n'.join(aligned(table, left=(0, len(table[0]) - 1)) for table in tables)


def _step(plan: Plan) -> list[Row]:
  costs = plan.costs
  whole = costs.ordered_seconds
  rows: list[Row] = [
    ('where the step goes', 'number', 'ms', 'share', 'matrix', 'vector', 'memory', 'limit')
  ]
  for row in shares(costs):
    bounds = ('', '', '', 'network')
    if row.name != WAITS:
      bounds = (ms(row.matrix), ms(row.vector), ms(row.memory), row.limit)
    of_step = percent(row.seconds / whole)
    rows.append((row.name, f'{row.count:,}', ms(row.seconds), of_step, *bounds))
  mfu = plan.model_flops / plan.topology.chip.peak / plan.topology.devices / whole
  rows.append(('a step in its order', '', ms(whole), f'MFU {percent(mfu)}', '', '', '', ''))
  return rows


def _operations(costs: Costs) -> list[Row]:
  rows: list[Row] = [
    ('the longest operations', 'times', 'ms, all', 'µs', 'matrix', 'vector', 'memory', 'row')
  ]
  dearest = sorted(costs.operations, key=lambda one: -one.times * one.seconds)[:_DEAREST]
  for one in dearest:
    bounds = (f'{1e6 * bound:,.0f}' for bound in (one.matrix, one.vector, one.memory))
    every, each = ms(one.times * one.seconds), f'{1e6 * one.seconds:,.0f}'
    rows.append((one.name, f'{one.times:,}', every, each, *bounds, row_of(one)))
  return rows


def _collectives(costs: Costs) -> list[Row]:
  rows: list[Row] = [
    ('collectives', 'over', 'times', 'ms', 'beside work', 'exposed', 'what runs beside them')
  ]
  grouped: dict[tuple[str, ...], list[Collective]] = {}
  for one in costs.collectives:
    how = 'synchronous' if one.synchronous else 'asynchronous'
    label = f'{one.cost.axis}: {one.kind}, {how}'
    grouped.setdefault((label, one.cost.network), []).append(one)
  for (label, network), ones in sorted(
    grouped.items(), key=lambda item: -_total(item[1], 'exposed')
  ):
    names = sorted({name for one in ones for name in one.beside[:_NAMED]})
    more = f' and {len(names) - _NAMED} others' if len(names) > _NAMED else ''
    times = f'{sum(one.times for one in ones):,}'
    seconds = (ms(_total(ones, name)) for name in ('seconds', 'between', 'exposed'))
    rows.append((label, network, times, *seconds, ', '.join(names[:_NAMED]) + more or 'nothing'))
  return rows


def _total(ones: Iterable[Collective], name: str) -> float:
  """Return the sum of an attribute in seconds over all runs of collectives."""
  return sum(one.times * getattr(one, name) for one in ones)


def to_json(costs: Costs) -> list[dict[str, float]]:
  """Return the rows for a JSON file."""
  return [dataclasses.asdict(row) for row in shares(costs)]
