"""The loss with a teacher, against one written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.model.distilled_loss import Heads, distilled_objective
from tokenformer_jax.parallel import sharding

BATCH, LENGTH, VOCAB = 8, 12, 16
WIDTH, TEACHER_WIDTH = 8, 24
Z_LOSS = 0.1


def _draw(width: int, seed: int) -> Heads:
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(BATCH, LENGTH, width)).astype(np.float32)
  return Heads(hidden, rng.normal(size=(VOCAB, width)).astype(np.float32))


def _targets() -> np.ndarray:
  targets = np.random.default_rng(2).integers(0, VOCAB, (BATCH, LENGTH), np.int32)
  targets[:, 9:] = -1
  return targets


def _softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def _by_numpy(
  student: Heads, teacher: Heads, weight: float, temperature: float
) -> tuple[float, Heads]:
  """The objective in float64, and its gradient by the student's input and head."""
  hidden, head, of_hidden, of_head = (np.asarray(x, np.float64) for x in (*student, *teacher))
  s, t = hidden @ head.T, of_hidden @ of_head.T
  targets = _targets()
  counts = (targets >= 0)[..., None]
  one_hot = np.eye(VOCAB)[targets]
  log_z = np.log(np.exp(s).sum(axis=-1, keepdims=True))
  p, q = _softmax(t / temperature), _softmax(s / temperature)
  hard = log_z - np.sum(one_hot * s, axis=-1, keepdims=True)
  soft = -np.sum(p * np.log(q), axis=-1, keepdims=True)
  each = weight * temperature**2 * soft + (1 - weight) * hard + Z_LOSS * log_z**2
  d_s = weight * temperature * (q - p) + (1 - weight) * (_softmax(s) - one_hot)
  d_s = counts * (d_s + 2 * Z_LOSS * log_z * _softmax(s))
  gradient = Heads(d_s @ head, np.einsum('btv,btd->vd', d_s, hidden))
  return float(np.sum(counts * each)), gradient


def _made(chunk: int, weight: float, temperature: float, z_loss: float = Z_LOSS):
  def value(student: Heads, teacher: Heads):
    options = {'weight': weight, 'temperature': temperature, 'z_loss': z_loss, 'chunk': chunk}
    return distilled_objective(Heads(*student), Heads(*teacher), _targets(), **options)

  return value


@pytest.mark.parametrize(
  ('chunk', 'mesh', 'weight', 'temperature'),
  [
    (5, None, 0.7, 3.0),  # does not divide the length
    (5, {'fsdp': 4, 'tokens': 2}, 0.25, 1.0),
    (4, {'replica': 2, 'fsdp': 1, 'tokens': 4}, 0.7, 3.0),
  ],
)
def test_value_and_gradient_are_those_of_numpy(chunk, mesh, weight, temperature):
  student, teacher = _draw(WIDTH, 0), _draw(TEACHER_WIDTH, 1)
  want = _by_numpy(student, teacher, weight, temperature)
  made = jax.jit(jax.value_and_grad(_made(chunk, weight, temperature), has_aux=True))
  on = sharding.make_mesh(
    MeshConfig(**(mesh or {'fsdp': 1})), jax.devices() if mesh else jax.devices()[:1]
  )
  with jax.set_mesh(on):
    (value, sums), gradient = made(student, teacher)
  assert float(value) == pytest.approx(want[0], rel=1e-5)
  for got, expected, name in zip(gradient, want[1], Heads._fields, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=name)
  for own, one in ((sums.student, student), (sums.teacher, teacher)):
    q = _softmax(one.hidden_BxTxD @ one.embedding_VxD.T)
    nats = -np.sum(np.log(np.take_along_axis(q, _targets()[..., None], -1))[:, :9])
    assert float(own.nats) == pytest.approx(nats, rel=1e-5)
  assert float(sums.student.tokens) == 9 * BATCH


def test_no_gradient_reaches_the_teacher():
  gradient = jax.jit(jax.grad(lambda teacher: _made(5, 0.25, 2.0)(_draw(WIDTH, 0), teacher)[0]))(
    _draw(TEACHER_WIDTH, 1)
  )
  assert not any(np.any(one) for one in gradient), 'the teacher would be trained'


def test_logits_of_all_positions_are_never_in_memory_at_once():
  student, teacher = _draw(WIDTH, 0), _draw(TEACHER_WIDTH, 1)
  program = str(jax.make_jaxpr(jax.grad(_made(4, 0.25, 1.0), has_aux=True))(student, teacher))
  assert f'f32[{BATCH},4,{VOCAB}]' in program, 'the logits of a chunk have another shape'
  assert f'[{BATCH},{LENGTH},{VOCAB}]' not in program
  assert f'[{LENGTH // 4},{BATCH},4,{VOCAB}]' not in program, 'the scan stacks the logits'


def test_caps_are_those_of_each_models_logits():
  """The head is the unit matrix, so that the input is the logits."""
  student, teacher = (_draw(VOCAB, seed).hidden_BxTxD for seed in (0, 1))
  how = {'weight': 0.7, 'temperature': 2.0, 'z_loss': Z_LOSS, 'chunk': 5}

  def value(student, teacher, **caps):
    heads = (Heads(x, jnp.eye(VOCAB)) for x in (student, teacher))
    return jax.jit(lambda: distilled_objective(*heads, _targets(), **how, **caps)[0])()

  want = value(1.5 * np.tanh(student / 1.5), 0.5 * np.tanh(teacher / 0.5))
  np.testing.assert_allclose(value(student, teacher, caps=(1.5, 0.5)), want, rtol=1e-6)
