r"""Time one training step: ours, and the same model in PyTorch, eager and compiled.

  python benchmarks/train_step.py                              a 22M model on the CPU
  python benchmarks/train_step.py --size=150m --batch=16       on one GPU, bfloat16

Needs `pip install -e ".[benchmark]"`. Every contender has its own process. They take turns, one
step each, so that other load on the machine affects all of them. The first steps (compilation,
memory) do not count. The command prints seconds (median, least, most), model TFLOP/s and MFU, and
writes the seconds as JSON with `--out`. On a CPU it also prints the speed of matrix products alone.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from contenders import SIZES, Contender, Size, model_config, torch_model

WARM_UP = 3
CONTENDERS = ('jax', 'torch_eager', 'torch_compiled')
# Values of `train.remat` that recompute no whole layer.
_WITHOUT_CHECKPOINTS = ('auto', 'everything', 'score_inputs')


def jax_step(size: Size, remat: str) -> Callable[[], None]:
  """Return our step as `tokenformer_jax.train` builds it; a call makes a step and waits for it."""
  import jax  # noqa: PLC0415 (each process loads one of the two frameworks)
  import numpy as np  # noqa: PLC0415

  from tokenformer_jax import config, tasks  # noqa: PLC0415
  from tokenformer_jax.parallel import sharding  # noqa: PLC0415
  from tokenformer_jax.steps import step  # noqa: PLC0415

  values = config.to_config_dict(config.Config(model=model_config(size)))
  values.data.update(batch_size=size.batch, sequence_length=size.length)
  values.train.update(remat=remat, loss_chunk=min(512, size.length))
  resolved = config.resolve(values)
  mesh = sharding.make_mesh(resolved.mesh)
  task = tasks.make(resolved)
  program = step.make_program(task, resolved)
  train_step = step.make_train_step(program, mesh)
  shardings = program.state_shardings(mesh)
  state = jax.jit(program.initial_state, out_shardings=shardings)(0)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, size.vocab_size, (size.batch, size.length + 1), np.int32)
  batch = jax.device_put(ids, sharding.batch_sharding(mesh))

  def run() -> None:
    nonlocal state
    with jax.set_mesh(mesh):
      state, figures = train_step(state, batch)
    jax.block_until_ready((state, figures))

  return run


def torch_step(size: Size, *, compiled: bool, checkpointing: bool) -> Callable[[], None]:
  """Return the step of the same model and optimizer in PyTorch; a call waits for its end."""
  import torch  # noqa: PLC0415
  from torch_tokenformer import build_optimizer, build_train_step  # noqa: PLC0415

  cuda = torch.cuda.is_available()
  device = 'cuda' if cuda else 'cpu'
  model = torch_model(size, checkpointing=checkpointing)
  train_step = build_train_step(model, build_optimizer(model), bf16=cuda, compile=compiled)
  ids = torch.randint(0, size.vocab_size, (size.batch, size.length + 1), device=device)
  inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

  def run() -> None:
    loss, _ = train_step(inputs, targets)
    float(loss)
    if cuda:
      torch.cuda.synchronize()

  return run


def matmul_flops(size: Size) -> float:
  """Return FLOP/s of the CPU: the fastest of PyTorch's float32 products at the model's shapes."""
  import torch  # noqa: PLC0415

  rows, fastest = size.batch * size.length, 0.0
  for columns in (size.qkv, size.ffn, size.vocab_size):
    for shapes in (
      ((rows, size.width), (size.width, columns)),
      ((rows, columns), (columns, size.width)),
      ((columns, rows), (rows, size.width)),
    ):
      left, right = (torch.randn(shape) for shape in shapes)
      flops = 2 * rows * size.width * columns
      for _ in range(5):
        start = time.perf_counter()
        torch.matmul(left, right)
        fastest = max(fastest, flops / (time.perf_counter() - start))
  return fastest


def serve(contender: str, size: Size, remat: str) -> None:
  """Make a step for every line of the standard input, and print its seconds."""
  if contender == 'jax':
    run = jax_step(size, remat)
  else:
    compiled = contender == 'torch_compiled'
    run = torch_step(size, compiled=compiled, checkpointing=remat not in _WITHOUT_CHECKPOINTS)
  for _ in sys.stdin:
    start = time.perf_counter()
    run()
    print(time.perf_counter() - start, flush=True)


def main() -> None:
  """Run the contenders in turns and print a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--size', choices=SIZES, default='cpu_22m')
  parser.add_argument('--batch', type=int, help='sequences in a step')
  parser.add_argument('--remat', default='score_inputs', help='see tokenformer_jax/model/stack.py')
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--contenders', default=','.join(CONTENDERS), help='names, comma-separated')
  parser.add_argument('--out', help='a JSON file for the figures')
  parser.add_argument('--serve', choices=CONTENDERS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  size = SIZES[args.size]
  if args.batch:
    size = dataclasses.replace(size, batch=args.batch)
  if args.serve:
    serve(args.serve, size, args.remat)
    return
  arguments = [f'--size={args.size}', f'--batch={size.batch}', f'--remat={args.remat}']
  contenders = []
  for name in args.contenders.split(','):
    contender = Contender(__file__, name, arguments)
    warm_up = [contender.step() for _ in range(WARM_UP)]
    print(f'{name}: first step {warm_up[0]:.1f} s', file=sys.stderr)
    contenders.append(contender)
  for _ in range(args.rounds):
    for contender in contenders:
      contender.seconds.append(contender.step())
  for contender in contenders:
    contender.close()
  report(contenders, args.size, size, args.out)


def report(contenders: list[Contender], name: str, size: Size, out: str | None) -> None:
  """Print the table, and write the figures if asked to."""
  import jax  # noqa: PLC0415 (not before the measurements)

  from tokenformer_jax.model import flops  # noqa: PLC0415

  model = model_config(size)
  step_flops = size.batch * size.length * flops.train_flops(model, size.length)
  peak = flops.peak_flops(jax.devices()[0])
  parameters = flops.matrix_parameters(model) + size.vocab_size * size.width
  print(
    f'{name}: {parameters / 1e6:.1f}M parameters, {size.batch} × {size.length} tokens, '
    f'{step_flops / 1e9:.0f} GFLOP a step, on {jax.devices()[0].device_kind}'
  )
  if jax.default_backend() == 'cpu':
    bound = matmul_flops(size)
    print(
      f'machine: float32 matrix products at {bound / 1e9:.0f} GFLOP/s (torch.matmul), at which the '
      f'FLOPs of a step take {step_flops / bound:.3f} s'
    )
  print(f'{"":16}{"median s":>10}{"least":>9}{"most":>9}{"TFLOP/s":>10}{"MFU":>8}')
  figures = {}
  for contender in contenders:
    seconds = sorted(contender.seconds)
    median = statistics.median(seconds)
    mfu = f'{step_flops / median / peak:.1%}' if peak else '–'
    print(
      f'{contender.name:16}{median:10.3f}{seconds[0]:9.3f}{seconds[-1]:9.3f}'
      f'{step_flops / median / 1e12:10.3f}{mfu:>8}'
    )
    figures[contender.name] = {'median': median, 'least': seconds[0], 'most': seconds[-1]}
  if out:
    Path(out).write_text(json.dumps({'size': dataclasses.asdict(size), **figures}, indent=2) + '\n')


if __name__ == '__main__':
  main()
