"""Apply the steps of a growth to a training state, one array at a time.

The arrays of the new state are recipes: which old arrays each reads, and what it draws. A pass over
shapes finds them (`Growth.recipe`). `grow_state` makes all arrays in one function of JAX;
`Programs` makes one after the other, and frees the old ones.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.grow.steps.step import Arrays, Step, drawing_key, drawing_salt
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, Path, lookup
from tokenformer_jax.parallel import rules
from tokenformer_jax.steps import optimizers, statistics
from tokenformer_jax.steps.step import State

Steps = tuple[Step, ...]
_PARAMETERS = ('params', 'ema')  # the trees of a state that hold parameters, or their average


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How an array of a new state is made: the parameter at `path`, or its statistic `name`.

  Attributes:
    reads: the paths of the old arrays that it is made from, in the tree of the same statistic.
    draws: the paths that salt its draws, each in the model of the step that draws.
    data: the numbers of steps, and the paths in their data.
    unchanged: whether it is the one array that it reads.
  """

  name: str
  path: Path
  reads: tuple[Path, ...]
  draws: tuple[Path, ...]
  data: tuple[tuple[int, Path], ...]
  unchanged: bool


class Inputs(NamedTuple):
  """The arrays that a recipe takes, or their shapes."""

  old: list[Any]
  salts: np.ndarray
  data: list[Any]


class Growth:
  """The steps of a growth, and the arrays that they make.

  Args:
    model: the model of the old state.
    steps: from it to another model; none keeps every array.
    grow: the seed of the draws, and how to treat moments and counters.
  """

  def __init__(self, model: ModelConfig, steps: Steps, grow: GrowConfig):
    self._steps, self._grow = steps, grow
    self.before = models.define(model)
    self.after = models.define(steps[-1].after) if steps else self.before
    self._recipes: dict[tuple[str, Path], Recipe] = {}

  def recipe(self, name: str, path: Path) -> Recipe:
    """Return the recipe of an array."""
    if (name, path) not in self._recipes:
      self._recipes[name, path] = self._trace(name, path)
    return self._recipes[name, path]

  def _trace(self, name: str, path: Path) -> Recipe:
    """Return a recipe from a pass over shapes that records what the array is made from."""
    # Dicts as ordered sets.
    reads, draws, data, unchanged = {}, {}, {}, False

    def make(tree: Params, salt: jax.Array) -> jax.Array:
      nonlocal unchanged

      def old(path: Path) -> jax.Array:
        reads[path] = None
        return lookup(tree, path)

      def salt_at(path: Path) -> jax.Array:
        draws[path] = None
        return salt

      def data_at(number: int, path: Path) -> jax.Array:
        data[number, path] = None
        return self._steps[number].own(path)

      new = self._view(name, old, salt_at, data_at)(path)
      unchanged = len(reads) == 1 and new is lookup(tree, *reads)
      return new

    jax.eval_shape(make, self.before.abstract, jax.ShapeDtypeStruct((), jnp.uint32))
    unchanged = unchanged and not (name and self._grow.moments == 'drop')
    return Recipe(name, path, tuple(reads), tuple(draws), tuple(data), unchanged)

  def _view(
    self,
    name: str,
    old: Arrays,
    salt_at: Callable[[Path], jax.Array],
    data_at: Callable[[int, Path], jax.Array],
  ) -> Arrays:
    """Return the arrays after all steps; statistics have the shapes of their parameters."""

    def keys(path: Path) -> jax.Array:
      return drawing_key(self._grow.seed, salt_at(path))

    arrays = old
    for number, step in enumerate(self._steps):
      if step.data is not None:
        step = dataclasses.replace(step, data=functools.partial(data_at, number))
      if name:
        arrays = functools.partial(step.moment, old=arrays, order=statistics.ORDERS[name])
      else:
        arrays = functools.partial(step.param, old=arrays, keys=keys)
    return arrays

  def inputs(self, recipe: Recipe, tree: Params) -> Inputs:
    """Return what a recipe takes from the old tree and from the steps."""
    return Inputs(
      [lookup(tree, path) for path in recipe.reads],
      np.array([drawing_salt(path) for path in recipe.draws], np.uint32),
      [self._steps[number].own(path) for number, path in recipe.data],
    )

  def make(self, recipe: Recipe, inputs: Inputs) -> jax.Array:
    """Return an array of the new state; the function is pure."""
    if recipe.unchanged:
      return inputs.old[0]
    name, old = recipe.name, dict(zip(recipe.reads, inputs.old, strict=True))
    if name:
      shapes = {path: lookup(self.before.abstract, path).shape for path in old}
      old = {path: statistics.expand(name, a, shapes[path]) for path, a in old.items()}
    salts = dict(zip(recipe.draws, inputs.salts, strict=True))
    data = dict(zip(recipe.data, inputs.data, strict=True))
    view = self._view(name, old.__getitem__, salts.__getitem__, lambda *key: data[key])
    new = view(recipe.path)
    if not name:
      return new
    if self._grow.moments == 'drop':
      return jnp.zeros_like(statistics.reduce(name, new))
    return statistics.reduce(name, statistics.with_history(name, new))

  def map_tree(
    self, f: Callable[[Recipe], Any], name: str, tree: Params, shapes: Params | None = None
  ) -> Params:
    """Return the new tree of the values of `f`.

    The old tree holds the parameters (`name` is empty) or the statistic `name` of them. Arrays
    without the statistic stay masked. `shapes` is like the new tree; None: of the new model.
    """

    def of_array(path: Path, _: Any) -> Any:
      if name and self._is_masked(name, path, tree):
        return optax.MaskedNode()
      return f(self.recipe(name, path))

    return jax.tree.map_with_path(of_array, self.after.abstract if shapes is None else shapes)

  def make_tree(self, name: str, tree: Params, shapes: Params | None = None) -> Params:
    """Return the new tree of arrays: see `map_tree`. The function is pure."""
    return self.map_tree(lambda one: self.make(one, self.inputs(one, tree)), name, tree, shapes)

  def _is_masked(self, name: str, path: Path, tree: Params) -> bool:
    """Return whether a statistic is not kept: as for the old arrays, or as for those like it."""
    if sources := self.recipe('', path).reads:
      return any(statistics.is_masked(lookup(tree, source)) for source in sources)
    known = [
      (info, statistics.is_masked(lookup(tree, at)))
      for at, info in jax.tree_util.tree_leaves_with_path(self.before.info)
    ]
    return not optimizers.is_kept(name, lookup(self.after.info, path), known)

  def map_state(self, f: Callable[[str, Params], Params], state: State) -> State:
    """Map the trees of parameters and statistics, and set the counters that `grow` restarts."""
    grow = self._grow

    def map_count(part: Any, count: jax.Array) -> jax.Array:
      is_rate = isinstance(part, optax.ScaleByScheduleState)  # the count of the learning rate
      restarts = grow.step == 'restart' if is_rate else grow.moments == 'drop'
      return jnp.zeros_like(count) if restarts else count

    counters = {k: value for k, value in state.items() if k not in (*_PARAMETERS, 'opt_state')}
    if grow.step == 'restart':
      counters = jax.tree.map(jnp.zeros_like, counters)
    return {
      **{name: f('', state[name]) for name in _PARAMETERS if name in state},
      'opt_state': statistics.map_state(f, map_count, state['opt_state']),
      **counters,
    }


def grow_state(state: State, model: ModelConfig, steps: Steps, grow: GrowConfig) -> State:
  """Return the state after the steps; it has the optimizer's structure.

  The function is pure. Under jit with the target's shardings (`step.state_shardings`), no host or
  device ever holds more than its part.

  Args:
    state: from a run of `model` (see `step.initial_state`), with any optimizer.
    model: the model of the state.
    steps: see `Growth`.
    grow: see `Growth`.
  """
  growth = Growth(model, steps, grow)
  return growth.map_state(growth.make_tree, state)


class Programs:
  """Compiles the program of each recipe of a growth, and makes the arrays one after the other.

  Args:
    growth: the recipes.
    mesh: the mesh of the new arrays.
    pool: compiles.
  """

  def __init__(self, growth: Growth, mesh: Mesh, pool: concurrent.futures.Executor):
    self._growth, self._mesh, self._pool = growth, mesh, pool
    self._compiled: dict[tuple[str, str], concurrent.futures.Future] = {}  # by text and inputs
    # By name and path; None for an array that stays unchanged, and where it is.
    self._programs: dict[tuple[str, Path], concurrent.futures.Future | None] = {}

  def compile(self, state: State) -> None:
    """Start to compile the programs for a state, or for its shapes and shardings."""
    self._growth.map_state(self._compile_tree, state)

  def _compile_tree(self, name: str, tree: Params) -> Params:
    def start(recipe: Recipe) -> None:
      if (name, recipe.path) not in self._programs:
        self._programs[name, recipe.path] = self._program(recipe, tree)

    self._growth.map_tree(start, name, tree)
    return tree

  def _program(self, recipe: Recipe, tree: Params) -> concurrent.futures.Future | None:
    axes = statistics.kept_axes(recipe.name, lookup(self._growth.after.axes, recipe.path))
    sharding = NamedSharding(self._mesh, rules.spec(axes))
    inputs = self._growth.inputs(recipe, tree)
    if recipe.unchanged and inputs.old[0].sharding == sharding:
      return None
    make = jax.jit(functools.partial(self._growth.make, recipe), out_shardings=sharding)
    lowered = make.lower(inputs)
    # Many arrays have the same program; its text lacks the inputs that it does not use.
    key = lowered.as_text(), str(lowered.in_avals)
    if key not in self._compiled:
      self._compiled[key] = self._pool.submit(lowered.compile)
    return self._compiled[key]

  def run(self, state: State, see: Callable[[Params], None] = lambda params: None) -> State:
    """Return the new state; free each old array once the arrays made from it exist.

    `see` is called with the new parameters.
    """

    def grown(name: str, tree: Params) -> Params:
      new = self._run_tree(name, tree)
      if tree is state['params']:
        see(new)
      return_freed_memory()
      return new

    return self._growth.map_state(grown, state)

  def _run_tree(self, name: str, tree: Params) -> Params:
    made: collections.deque[tuple[jax.Array, list[jax.Array]]] = collections.deque()
    uses: collections.Counter[int] = collections.Counter()

    def count(recipe: Recipe) -> None:
      uses.update(id(lookup(tree, path)) for path in recipe.reads)

    def free_the_oldest() -> None:
      new, olds = made.popleft()
      jax.block_until_ready(new)
      for old in olds:
        old.delete()

    def make(recipe: Recipe) -> jax.Array:
      program, inputs = self._programs[name, recipe.path], self._growth.inputs(recipe, tree)
      if program is None:
        return inputs.old[0]
      new = program.result()(inputs)
      uses.subtract(map(id, inputs.old))
      made.append((new, [old for old in inputs.old if not uses[id(old)]]))
      if len(made) == 2:  # Keep at most two new arrays in flight.
        free_the_oldest()
      return new

    self._growth.map_tree(count, name, tree)
    grown = self._growth.map_tree(make, name, tree)
    while made:
      free_the_oldest()
    return grown


def return_freed_memory() -> None:
  """Return the memory that glibc's allocator keeps to the system: a tenth of a CPU's state."""
  with contextlib.suppress(OSError, AttributeError):  # another C library
    ctypes.CDLL('libc.so.6').malloc_trim(0)
