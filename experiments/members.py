"""Train many small models at once: all of one shape are members of one compiled program.

A tiny model alone leaves an accelerator idle, which waits for the launches of its operations. Here
one step trains all members, by the project's own loss and optimizer, in a loop over a chunk of
steps: at once by `jax.vmap`, and on a CPU one after the other. Each member has its own seed, place
in the data, rates and decay of weights, so runs of other lengths, recipes and ages share a program.
When a run ends, the next one takes its slot. Growth is that of `grow.state`, between two chunks.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from member_edits import EDITS
from member_runs import AGES, Run, Text

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, GrowConfig
from tokenformer_jax.grow import state as grow_state
from tokenformer_jax.model.params import ParamInfo, Params
from tokenformer_jax.steps import last_growth, optim
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.training import sizes

_EVALUATED = 8  # the most members that are evaluated together
_READY = 128  # first states that are made before there is a slot for them
_PARTS = 16  # of the validation text, one after the other


def _of_members(one: Callable[..., Any]) -> Callable[..., Any]:
  """Map a function over members: on a CPU one after the other, elsewhere all at once.

  A CPU is busy with one member, and the products of many at once are slower there.
  """
  if jax.default_backend() != 'cpu':
    return jax.vmap(one)
  return lambda *arguments: jax.lax.map(lambda given: one(*given), arguments)


class Program:
  """The compiled steps of all members of one shape, and the slots that they are in."""

  def __init__(
    self,
    config: Config,
    text: Text,
    slots: int,
    chunk: int,
    unroll: int = 1,
    teacher: Config | None = None,
  ):
    """Define the programs; `config` decides everything but rates, decay, seeds and lengths.

    With the config of a `teacher`, each member learns also from the state that it grew from.
    """
    self.config, self.text = sizes.fill_in(config), text
    self.slots, self.chunk, self.unroll = slots, chunk, unroll
    self.evaluated = min(slots, _EVALUATED)
    self.task = tasks.make(self.config, teacher=teacher and sizes.fill_in(teacher).model)
    self.batch = config.data.batch_size
    self.length = config.data.sequence_length
    plain = dataclasses.replace(self.config.optim, weight_decay=0.0)
    info = self.task.definition.info
    one = optax.schedules.constant_schedule(1.0)
    self.tx = optim.make_optimizer(plain, one, info)
    self._decays = optim.decay_mask(info)
    self.runs: list[Run | None] = [None] * slots
    self.steps = np.zeros(slots, np.int64)
    self._begin = jax.jit(self._first_state)
    self._grown: dict[Any, Callable[..., Any]] = {}
    self.compiled = False

  # Functions of arrays.

  def _first_state(self, seed: jax.Array) -> State:
    state = step_lib.initial_state(self.task.definition, self.tx, seed)
    return {name: state[name] for name in ('params', 'opt_state')}

  def _step(
    self, state: State, batch: jax.Array, rates: jax.Array, fixed: State
  ) -> tuple[State, jax.Array]:
    """Make a step of one member; the optimizer has the rate 1 and no decay."""
    params, info, decay = state['params'], self.task.definition.info, fixed['decay']
    given = (batch, jax.random.key(0), *([fixed['teacher']] if self.task.teacher else []))
    grads, figures = jax.grad(self.task.loss, has_aux=True)(params, *given)
    updates, opt_state = self.tx.update(grads, state['opt_state'], params)

    def moved(info: ParamInfo, decays: bool, new: jax.Array, p: jax.Array, u: jax.Array):
      of_age = rates[1] + new * (rates[2] - rates[1]) if info.in_layers else rates[0]
      return p + of_age * (u - decay * p if decays else u)

    params = jax.tree.map(moved, info, self._decays, fixed['is_new'], params, updates)
    return {'params': params, 'opt_state': opt_state}, figures['loss']

  def _chunk(self, states: State, fixed: State, rates: jax.Array, tokens: jax.Array, order_: Any):
    """Make the steps of a chunk; `rates` are [steps, members, ages]; return losses as well."""

    def batch(seed: jax.Array, first: jax.Array) -> jax.Array:
      samples = jax.lax.dynamic_slice(order_, (seed, first), (1, self.batch))[0]
      places = samples[:, None] * self.length + jnp.arange(self.length + 1)[None]
      return tokens[places].astype(jnp.int32)

    def step(carry: Any, rates: jax.Array) -> Any:
      states, first = carry
      batches = jax.vmap(batch)(fixed['seed'], first)
      states, losses = _of_members(self._step)(states, batches, rates, fixed)
      return (states, first + self.batch), losses

    carry = (states, fixed['first'])
    (states, _), losses = jax.lax.scan(step, carry, rates, unroll=self.unroll)
    return states, losses

  def _evaluate(self, params: Params, held_out: jax.Array) -> jax.Array:
    """Return the nats a token of members [members, …]; the rows come in parts [parts, rows, …]."""

    def part(rows: jax.Array) -> Any:
      sums = jax.vmap(lambda params: self.task.sums(params, rows).task)(params)
      return sums.nats, sums.tokens

    nats, tokens = jax.lax.map(part, held_out)
    return jnp.sum(nats, 0) / jnp.sum(tokens, 0)

  # Slots.

  def abstract_parts(self) -> tuple[State, State]:
    """Return the shapes of the states of all slots, and of what stays fixed in a chunk."""
    one = jax.eval_shape(self._first_state, 0)
    fixed = {'is_new': self._all_old(), 'decay': np.float32(0)}
    fixed |= {'seed': np.int32(0), 'first': np.int32(0)}
    if self.task.teacher:
      fixed['teacher'] = self.task.teacher.abstract

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((self.slots, *x.shape), x.dtype)

    return jax.tree.map(of_all, one), jax.tree.map(of_all, fixed)

  def compile(self) -> None:
    """Compile all programs, and put zeros into the slots."""
    began = time.time()
    states, fixed = self.abstract_parts()
    rates = jax.ShapeDtypeStruct((self.chunk, self.slots, AGES), jnp.float32)
    tokens, orders = jnp.asarray(self.text.tokens), jnp.asarray(self.text.order)
    chunk = jax.jit(self._chunk, donate_argnums=0)
    compiled = chunk.lower(states, fixed, rates, tokens, orders).compile()
    self._run_chunk = lambda *arguments: compiled(*arguments, tokens, orders)
    rows = self.text.held_out
    rows = rows[: len(rows) // _PARTS * _PARTS].reshape(_PARTS, -1, rows.shape[-1])
    rows = jnp.asarray(rows)
    few = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((self.evaluated, *x.shape[1:]), x.dtype), states['params']
    )
    evaluate = jax.jit(self._evaluate).lower(few, rows).compile()
    self._run_evaluate = lambda params: evaluate(params, rows)
    self._put = jax.jit(
      lambda all_, slot, one: jax.tree.map(lambda a, b: a.at[slot].set(b), all_, one),
      donate_argnums=0,
    )
    self._take = jax.jit(lambda all_, slots: jax.tree.map(lambda a: a[slots], all_))
    zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (states, fixed)))
    self.states, self.fixed = zeros()
    with jax.default_device(jax.devices('cpu')[0]):
      self._begin(0)
    self.compiled = True
    print(f'compiled {self.name} in {time.time() - began:.0f} s', flush=True)

  @property
  def name(self) -> str:
    """The model in words."""
    model, ffn = self.config.model, self.config.model.layer.ffn
    inside = f'{ffn.groups or ffn.tokens} tokens' if ffn.kind == 'pattention' else ffn.kind
    return f'{model.pattern} of width {model.width}, {inside}, {self.config.optim.kind}'

  def put(self, run: Run, state: State, fixed: State) -> None:
    """Put a run into a free slot."""
    slot = self.runs.index(None)
    self.runs[slot], self.steps[slot] = run, run.first
    fixed = {**fixed, 'decay': np.float32(run.decay)}
    fixed |= {'seed': np.int32(run.seed), 'first': np.int32(run.first * self.batch)}
    self.states = self._put(self.states, slot, state)
    self.fixed = self._put(self.fixed, slot, fixed)

  def advance(self) -> np.ndarray:
    """Make a chunk of steps of all members; return the losses [steps, members] when done."""
    rates = np.zeros((self.chunk, self.slots, AGES), np.float32)
    for slot, run in enumerate(self.runs):
      if run is not None:
        first = int(self.steps[slot])
        rates[:, slot] = run.rate.by_age(first, first + self.chunk)
    self.fixed['first'] = jnp.asarray(self.steps * self.batch, jnp.int32)
    self.states, losses = self._run_chunk(self.states, self.fixed, jnp.asarray(rates))
    self.steps += self.chunk
    return losses

  def evaluate(self, slots: Sequence[int]) -> list[float]:
    """Return the bits a byte of the members in some slots on held-out text."""
    found: list[float] = []
    for first in range(0, len(slots), self.evaluated):
      some = list(slots[first : first + self.evaluated])
      numbers = np.array(some + some[:1] * (self.evaluated - len(some)))
      nats = np.asarray(self._run_evaluate(self._take(self.states['params'], numbers)))
      found += [self.bits(float(value)) for value in nats[: len(some)]]
    return found

  def bits(self, nats: float) -> float:
    """Return nats a token as bits a byte."""
    return nats / math.log(2) / self.text.bytes_per_token

  def saved(self, slot: int) -> State:
    """Return the state of a member, in the memory of the host."""
    one = self._take(self.states, np.array([slot]))
    return jax.tree.map(lambda x: np.asarray(x)[0], one)

  # First states, on the CPU.

  def _all_old(self) -> Params:
    return jax.tree.map(
      lambda info: (
        np.zeros((1,) * len(info.axes), np.float32)
        if not info.in_layers
        else np.zeros(self._ages_of(info), np.float32)
      ),
      self.task.definition.info,
    )

  def _ages_of(self, info: ParamInfo) -> tuple[int, ...]:
    """Return the shape of the ages of an array: one for each token of each layer."""
    sizes_ = [len(info.depth), *[1] * (len(info.axes) - 1)]
    if info.token_axis is not None:
      sizes_[info.token_axis] = sum(info.groups)
    return tuple(sizes_)

  def is_new(self, source: 'Program', place: str) -> Params:
    """Return 1 for what a growth adds and 0 for the rest, in the shape of `fixed['is_new']`."""
    growth = last_growth.growth_from(source.config.model, self.config.model, place)

    def ages(info: ParamInfo, count: int) -> np.ndarray:
      if not info.in_layers:
        return np.zeros((1,) * len(info.axes), np.float32)
      shape = self._ages_of(info)
      found = np.zeros(shape, np.float32)
      if info.token_axis is not None:
        tokens = np.arange(shape[info.token_axis]) >= count
        found += tokens.reshape([-1 if i == info.token_axis else 1 for i in range(len(shape))])
      layers = np.isin(info.depth, growth.new_layers)
      return np.maximum(found, layers.reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)

    return jax.tree.map(ages, self.task.definition.info, growth.old_tokens)

  def first_state(self, run: Run, begin: tuple['Program', State] | None) -> tuple[State, State]:
    """Return the state that a run begins with, and which of its parameters are new; its teacher."""
    fixed = {'is_new': self._all_old()}
    with jax.default_device(jax.devices('cpu')[0]):
      if begin is None:
        return jax.tree.map(np.asarray, self._begin(run.seed)), fixed
      source, state = begin
      if self.task.teacher:
        fixed['teacher'] = state['params']
      if run.grow is None:
        return state, fixed
      grow, is_new = self._grown[source.name, run.grow, run.edit]
      return jax.tree.map(np.asarray, grow(state)), {**fixed, 'is_new': is_new}

  def can_make(self, run: Run, source: 'Program | None') -> bool:
    """Return whether the growth of a run is compiled, if it has one."""
    return run.grow is None or (source.name, run.grow, run.edit) in self._grown

  def prepare(self, source: 'Program', config: GrowConfig, edit: str) -> None:
    """Compile a growth from another shape to this one."""
    before, after = source.config.model, self.config.model
    grow_state.check(before, after, config)
    is_new = self.is_new(source, config.place)
    info, std = self.task.definition.info, after.init.std

    def grow(state: State) -> State:
      grown = grow_state.grow(state, before, after, config)
      return EDITS[edit](grown, info, std, is_new) if edit else grown

    with jax.default_device(jax.devices('cpu')[0]):
      one = jax.eval_shape(source._first_state, 0)
      self._grown[source.name, config, edit] = jax.jit(grow).lower(one).compile(), is_new


@dataclasses.dataclass
class Work:
  """The runs that are to be made, and what has become of those that are.

  Attributes:
    programs: by shape.
    record: is called with the record of every run that ends.
    done: the names of runs that have ended before.
    until: the time at which to stop.
  """

  programs: dict[str, Program]
  record: Callable[[dict[str, Any]], None]
  done: set[str]
  until: float
  kept: dict[tuple[str, int], State] = dataclasses.field(default_factory=dict)
  curves: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  on_the_way: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
  ready: dict[str, futures.Future] = dataclasses.field(default_factory=dict)

  def make(self, runs: Sequence[Run]) -> None:
    """Make all runs in the order of their list, as far as slots and time allow."""
    by_name = {run.name: run for run in runs}
    needed: dict[str, Run] = {}

    def need(run: Run) -> None:
      if run.name not in needed:
        if run.begin is not None:
          need(by_name[run.begin[0]])
        needed[run.name] = run

    for run in runs:
      if run.name not in self.done:
        need(run)
    waiting = [run for run in runs if run.name in needed]
    used = [self.programs[shape] for shape in dict.fromkeys(run.shape for run in waiting)]
    sources = {run.name: self.programs[by_name[run.begin[0]].shape] for run in waiting if run.begin}
    with futures.ThreadPoolExecutor(16) as pool:
      compiling = [pool.submit(program.compile) for program in used]
      growths = {
        (run.shape, sources[run.name].name, run.grow, run.edit): run for run in waiting if run.grow
      }
      for run in growths.values():
        program, source = self.programs[run.shape], sources[run.name]
        compiling.append(pool.submit(program.prepare, source, run.grow, run.edit))
      self._loop(waiting, used, sources, compiling, pool)

  def _loop(
    self,
    waiting: list[Run],
    used: Sequence[Program],
    sources: Mapping[str, Program],
    compiling: Sequence[futures.Future],
    pool: futures.Executor,
  ) -> None:
    """Advance all programs, each from when it is compiled on."""
    began, chunks, steps = time.time(), 0, 0
    print(f'{len(waiting)} runs', flush=True)
    while time.time() < self.until:
      waiting = self._fill(waiting, sources, pool)
      busy = [program for program in used if any(program.runs)]
      if not busy and not self.ready:
        left = [one for one in compiling if not one.done()]
        if not left:
          break
        futures.wait(left, timeout=1, return_when=futures.FIRST_COMPLETED)
        continue
      shown = []
      for program, losses in [(program, program.advance()) for program in busy]:
        before, members = time.time(), sum(map(bool, program.runs))
        losses = np.asarray(losses)
        milliseconds = 1000 * (time.time() - before) / program.chunk
        shown.append(f'{members} of {program.slots} members, {milliseconds:.2f} ms a step')
        steps += program.chunk * members
        self._after(program, losses)
      chunks += 1
      if chunks % 10 == 0:
        spent = time.time() - began
        print(f'{spent:.0f} s: {len(waiting)} wait; {"; ".join(shown)}; {steps:,}', flush=True)
    for one in (*compiling, *self.ready.values()):
      one.cancel()
    for one in compiling:
      if one.done() and not one.cancelled() and (error := one.exception()):
        print(f'not compiled: {error!r}', flush=True)

  def _fill(
    self, waiting: Sequence[Run], sources: Mapping[str, Program], pool: futures.Executor
  ) -> list[Run]:
    """Put runs that can begin into free slots; return the others."""
    left = []
    for run in waiting:
      program, source = self.programs[run.shape], sources.get(run.name)
      can_begin = program.compiled and program.can_make(run, source)
      can_begin &= not run.begin or run.begin in self.kept
      if can_begin and run.name not in self.ready and len(self.ready) < _READY:
        begin = (source, self.kept[run.begin]) if run.begin else None
        self.ready[run.name] = pool.submit(program.first_state, run, begin)
      if None in program.runs and run.name in self.ready and self._is_made(run.name):
        program.put(run, *self.ready.pop(run.name).result())
        self.curves[run.name], self.on_the_way[run.name] = [], {}
      else:
        left.append(run)
    return left

  def _is_made(self, name: str) -> bool:
    """Return whether a first state is made; wait for it if no program has anything to do."""
    idle = not any(any(program.runs) for program in self.programs.values())
    return idle or self.ready[name].done()

  def _after(self, program: Program, losses: np.ndarray) -> None:
    """Keep, evaluate and record what a chunk has reached."""
    means, reached = losses.mean(axis=0), []
    for slot, run in enumerate(program.runs):
      if run is None:
        continue
      self.curves[run.name].append(round(program.bits(float(means[slot])), 4))
      step = int(program.steps[slot])
      if step in run.keep or step >= run.last or not math.isfinite(means[slot]):
        reached.append(slot)
    for slot, loss in zip(reached, program.evaluate(reached), strict=True):
      run, step = program.runs[slot], int(program.steps[slot])
      if step in run.keep:
        self.kept[run.name, step] = program.saved(slot)
      self.on_the_way[run.name][step] = round(loss, 5)
      if step >= run.last or not math.isfinite(means[slot]):
        program.runs[slot] = None
        self._end(run, loss, step)

  def _end(self, run: Run, loss: float, step: int) -> None:
    if run.name in self.done:  # It was made again for those that begin with it.
      return
    self.done.add(run.name)
    self.record(
      {
        'name': run.name,
        'loss': round(loss, 5) if math.isfinite(loss) else None,
        'first': run.first,
        'steps': step,
        'held_out': self.on_the_way[run.name],
        'curve': self.curves[run.name],
      }
    )


def record_to(path: Path) -> Callable[[dict[str, Any]], None]:
  """Return a function that appends a record to a file of JSON lines."""

  def record(line: dict[str, Any]) -> None:
    with path.open('a') as file:
      file.write(json.dumps(line) + '\n')

  return record
