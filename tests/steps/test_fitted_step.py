"""The training step runs with the fastest remat plan that fits a device's memory."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import mixture
from tiny import tiny_model

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, MeshConfig, TrainConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import fit, remat_plans
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.remat_plans import RematPlan

ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 33), np.int32))
MODEL = tiny_model(pattern='layer*2')


@pytest.fixture(scope='module')
def mesh():
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    yield mesh


@functools.cache
def _program(**train) -> step_lib.Program:
  config = Config(model=MODEL, train=TrainConfig(steps=10, **train))
  return step_lib.make_program(tasks.make(config), config)


@functools.cache
def _abstract_state() -> step_lib.State:
  return _program().abstract_state(sharding.make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.fixture(scope='module', autouse=True)
def _estimates_once():
  """Trace only once what each plan of a model saves for a batch."""
  saved_bytes, made = remat_plans.saved_bytes, {}

  def remembered(program, mesh, arguments):
    config, shapes = program.config, jax.tree.map(jnp.shape, arguments[1:])
    key = config.model, config.train.remat, config.train.layers, mesh, str(shapes)
    if key not in made:
      made[key] = saved_bytes(program, mesh, arguments)
    return made[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(remat_plans, 'saved_bytes', remembered)
    yield


def _fitted(mesh, capacity: float, **train) -> fit.FittedStep:
  return fit.FittedStep(_program(**train), mesh, free=lambda mesh, arguments: capacity)


def _record(monkeypatch, make) -> list[RematPlan]:
  """Return the plans with which steps are compiled from now on, by `make`."""
  found = []

  def remember(program, *arguments):
    found.append(RematPlan(program.config.train.remat, program.config.train.layers))
    return make(program, *arguments)

  monkeypatch.setattr(fit, 'make_train_step', remember)
  return found


@pytest.fixture
def compiled(monkeypatch):
  """The plans with which steps are compiled. The steps do nothing, and need 10⁹ bytes."""

  class Nothing:
    def lower(self, *arguments):
      return self

    def __call__(self, state, batch):
      return state, {'loss': 0.0}

  monkeypatch.setattr(fit, 'compile_lowered', lambda lowered: lowered)
  monkeypatch.setattr(fit, 'compiled_bytes', lambda step: 1e9)
  monkeypatch.setattr(fit, 'temporary_bytes', lambda step: 10**9)
  return _record(monkeypatch, lambda *arguments: Nothing())


def _call(step, rows=ROWS) -> None:
  for _ in range(2):
    step(_abstract_state(), rows)


def test_the_fastest_plan_is_compiled_once_if_it_fits(mesh, compiled, capsys):
  _call(_fitted(mesh, math.inf))
  assert compiled == [remat_plans.PLANS[0]], (
    'the step was compiled with another plan, or more than once'
  )
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and remat_plans.PLANS[0].flags in said, said


@pytest.fixture
def gpu(monkeypatch):
  """A mesh of one GPU, whose memory is that of this machine."""
  zeros = jnp.zeros
  monkeypatch.setattr(jnp, 'zeros', lambda *like, device=None, **more: zeros(*like, **more))
  return types.SimpleNamespace(local_devices=[types.SimpleNamespace(platform='gpu')])


def test_only_a_gpu_that_lacks_the_piece_has_none(mesh, gpu):
  assert fit.can_allocate(mesh, 2**60), 'a CPU was asked for memory'
  assert fit.can_allocate(gpu, 3 * 2**20)
  assert not fit.can_allocate(gpu, 2**47), 'more than a process can address was given'


@pytest.mark.parametrize('failing', ['allocation', 'compiler', 'another process'])
def test_a_plan_that_a_device_cannot_hold_falls_back(mesh, compiled, monkeypatch, capsys, failing):
  def refuse(lowered):
    if len(compiled) == 1:
      raise fit.DoesNotFitError('RESOURCE_EXHAUSTED: Used 19.5G of 15.7G hbm')
    return lowered

  results = iter([False, True])
  match failing:
    case 'allocation':
      monkeypatch.setattr(fit, 'can_allocate', lambda mesh, size: next(results))
    case 'compiler':
      monkeypatch.setattr(fit, 'compile_lowered', refuse)
    case _:
      monkeypatch.setattr(fit.hosts, 'in_any', lambda failed: failed or not next(results))
  _call(_fitted(mesh, math.inf))
  assert compiled == list(remat_plans.PLANS[:2]), 'the processes run different programs'
  assert f'with {compiled[0].flags}; trying' in capsys.readouterr().err


def _saved(remat: str, mesh) -> float:
  program = remat_plans.with_plan(_program(), RematPlan(remat, 'scan'))
  return remat_plans.saved_bytes(program, mesh, (_abstract_state(), ROWS))


def test_a_plan_that_saves_less_needs_less_memory(mesh):
  remats = ('everything', 'score_inputs', 'dots', 'full')
  saved = [_saved(remat, mesh) for remat in remats]
  assert saved == sorted(saved, reverse=True) and len(set(saved)) == 4, dict(
    zip(remats, saved, strict=True)
  )


def test_a_value_counts_that_has_the_shape_of_a_parameter(mesh):
  """With 16 tokens the slots of 8 experts have the shape of their matrices [8, 16, 32]."""
  config = Config(model=mixture('switch', layers=2), train=TrainConfig(steps=10, layers='scan'))
  program = step_lib.make_program(tasks.make(config), config)
  state = jax.eval_shape(program.initial_state, 0)
  saved = [remat_plans.saved_bytes(program, mesh, (state, ROWS[:, :n])) for n in (16, 17)]
  assert saved == sorted(saved), f'15 and 16 tokens: {saved}'


def test_estimates_choose_the_first_plan_to_try(mesh, monkeypatch):
  monkeypatch.setattr(remat_plans, '_WORKING_SET', 0)
  arguments = (_abstract_state(), ROWS)
  capacity = remat_plans.argument_bytes(arguments) + 1.2 * _saved('dots', mesh)
  found = list(remat_plans.affordable(_program(), mesh, arguments, capacity))
  # Without the kernel for TPUs, `attention` saves what `full` saves.
  want = [plan for plan in remat_plans.PLANS[4:] if plan.remat != 'full']
  assert found == want, 'the first to try is not the fastest that should fit'


def test_a_step_that_does_not_fit_falls_back_to_a_plan_that_needs_less(
  mesh, compiled, monkeypatch, capsys
):
  sizes = iter([3e9, 2e9, 1e6])
  monkeypatch.setattr(fit, 'compiled_bytes', lambda step: next(sizes))
  _call(_fitted(mesh, 1e9))
  assert compiled == list(remat_plans.PLANS[:3]), 'a plan was left out, or compiled twice'
  said = capsys.readouterr().err
  assert 'needs 2.8 of 0.9 GiB of a device with --config.train.remat=everything' in said, said


def test_a_fitted_step_learns_and_needs_more_than_its_arguments(mesh):
  program = _program(remat='full', layers='scan')
  step = fit.FittedStep(program, mesh, free=lambda mesh, arguments: math.inf)
  state, losses = step_lib.make_first_state(program, mesh)(0), []
  for _ in range(3):
    state, figures = step(state, ROWS)
    losses.append(float(figures['loss']))
  assert losses[2] < losses[1] < losses[0]
  (compiled,) = step._steps.values()
  assert fit.compiled_bytes(compiled) > remat_plans.argument_bytes((state, ROWS))
  assert fit.temporary_bytes(compiled) > 0


@pytest.mark.parametrize(
  ('said', 'kind'),
  [
    ('RESOURCE_EXHAUSTED: Used 19.5G of 15.7G hbm', fit.DoesNotFitError),
    ('INTERNAL: a mistake of the compiler', jax.errors.JaxRuntimeError),
  ],
)
def test_only_a_lack_of_memory_means_that_a_step_does_not_fit(said, kind):
  def fail():
    raise jax.errors.JaxRuntimeError(said)

  with pytest.raises(kind):
    fit.compile_lowered(types.SimpleNamespace(compile=fail))


def test_a_step_that_fits_in_no_plan_is_the_users_to_change(mesh, compiled):
  with pytest.raises(UserError, match=r'needs .* GiB of a device with .*config.data.batch_size'):
    _call(_fitted(mesh, 1e3))


def test_batches_of_another_shape_are_compiled_once_as_well(mesh, compiled):
  step = _fitted(mesh, math.inf)
  _call(step), _call(step, ROWS[:4]), _call(step)
  assert len(compiled) == 2


def test_a_copy_of_the_state_for_a_check_of_devices_is_kept_free(mesh, compiled):
  given = remat_plans.argument_bytes(_abstract_state())
  _call(_fitted(mesh, 1e9 + given / 2))
  with pytest.raises(UserError, match='nothing else needs less'):
    _call(_fitted(mesh, 1e9 + given / 2, check_devices=5))


@pytest.mark.parametrize(
  ('train', 'first', 'count'),
  [
    ({}, RematPlan('everything', 'unrolled'), 9),
    ({'remat': 'dots'}, RematPlan('dots', 'unrolled'), 2),
    ({'layers': 'scan'}, RematPlan('everything', 'scan'), 6),
    ({'remat': 'full', 'layers': 'unrolled'}, RematPlan('full', 'unrolled'), 1),
  ],
)
def test_values_of_the_config_limit_the_plans(train, first, count):
  found = remat_plans.open_plans(TrainConfig(**train), MODEL, 'TPU v5')
  assert (found[0], len(found)) == (first, count)


@pytest.mark.parametrize(
  ('layers', 'kind'), [(100, 'TPU v5'), (100, 'NVIDIA H100 80GB HBM3'), (2, 'TPU7x')]
)
def test_a_program_that_would_compile_for_hours_keeps_its_loop(layers, kind):
  model = dataclasses.replace(MODEL, pattern=f'layer*{layers}')
  assert {plan.layers for plan in remat_plans.open_plans(TrainConfig(), model, kind)} == {'scan'}
  asked = remat_plans.open_plans(TrainConfig(layers='unrolled'), model, kind)
  assert {plan.layers for plan in asked} == {'unrolled'}


def test_a_cpu_does_not_choose(mesh):
  step = fit.make_fitted_step(_program(), mesh)
  assert not isinstance(step, fit.FittedStep)


def test_devices_that_share_the_batch_save_their_part():
  arguments, found = (_abstract_state(), ROWS), []
  for devices in (1, 4):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
    program = remat_plans.with_plan(_program(), RematPlan('everything', 'scan'))
    found.append(remat_plans.saved_bytes(program, mesh, arguments))
  assert found[1] == pytest.approx(found[0] / 4, rel=0.1)
