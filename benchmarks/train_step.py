r"""Time one training step: ours, and the same model in PyTorch, eager and compiled.

  python benchmarks/train_step.py                              a 22M model on the CPU
  python benchmarks/train_step.py --size=150m                  on one GPU, bfloat16
  python benchmarks/train_step.py --size=1_5b --apart          where only one fits the memory

Needs `pip install -e ".[benchmark]"`. Every contender has its own process. They take turns, one
step each, so that other load on the machine affects all of them. The first steps (compilation,
memory) do not count. On a CPU both keep freed memory, as `tokenformer train` does. The command
prints seconds (median, least, most), model TFLOP/s, MFU and the most memory of a GPU. On a CPU it
also prints the speed of matrix products alone. `--size=default` is the model of `lm_stdlib`.
`--train=remat=dots` and the like change how ours runs. On a busy machine
`taskset -c 0 python benchmarks/train_step.py --clock=processor` compares the work of one core.
"""

import argparse
import ast
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

from contenders import (
  CHANNELS,
  CLOCKS,
  SIZES,
  Contender,
  Size,
  model_config,
  torch_model,
  train_config,
)

WARM_UP = 3
CONTENDERS = ('jax', 'torch_eager', 'torch_compiled')


def jax_step(size: Size, **train: str) -> Callable[[], None]:
  """Return our step as `tokenformer_jax.train` builds it; a call makes a step and waits for it.

  `train` are values of `config.train`, as text.
  """
  import jax  # noqa: PLC0415 (each process loads one of the two frameworks)
  import numpy as np  # noqa: PLC0415

  from tokenformer_jax import config, tasks  # noqa: PLC0415
  from tokenformer_jax.parallel import sharding  # noqa: PLC0415
  from tokenformer_jax.steps import fit, step  # noqa: PLC0415

  values = train_config(size)
  for key, value in train.items():
    is_text = isinstance(values.train[key], str)
    values.train[key] = value if is_text else ast.literal_eval(value)
  resolved = config.resolve(values)
  mesh = sharding.make_mesh(resolved.mesh)
  task = tasks.make(resolved)
  program = step.make_program(task, resolved)
  train_step = fit.make_fitted_step(program, mesh)
  shardings = program.state_shardings(mesh)
  state = jax.jit(program.initial_state, out_shardings=shardings)(0)
  rng = np.random.default_rng(0)
  if size.image:
    images = rng.integers(0, 256, (size.batch, size.image, size.image, CHANNELS), np.uint8)
    labels = rng.integers(0, size.vocab_size, size.batch, np.int32)
    drawn = {'images': images, 'labels': labels}
  else:
    drawn = rng.integers(0, size.vocab_size, (size.batch, size.length + 1), np.int32)
  batch = jax.device_put(drawn, sharding.batch_sharding(mesh))

  def run() -> None:
    nonlocal state
    with jax.set_mesh(mesh):
      state, figures = train_step(state, batch)
    jax.block_until_ready((state, figures))

  return run


def torch_step(size: Size, *, compiled: bool) -> Callable[[], None]:
  """Return the step of the same model and optimizer in PyTorch; a call waits for its end."""
  import torch  # noqa: PLC0415
  from torch_tokenformer import build_optimizer, build_train_step  # noqa: PLC0415

  cuda = torch.cuda.is_available()
  device = 'cuda' if cuda else 'cpu'
  model = torch_model(size)
  train_step = build_train_step(model, build_optimizer(model), bf16=cuda, compile=compiled)
  if size.image:
    shape = (size.batch, size.image, size.image, CHANNELS)
    inputs = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    targets = torch.randint(0, size.vocab_size, (size.batch,), device=device)
  else:
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


def most_memory(contender: str) -> float:
  """Return the most bytes of the device's memory that this process has had; 0: not known."""
  if contender == 'jax':
    import jax  # noqa: PLC0415

    return (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use', 0)
  import torch  # noqa: PLC0415

  return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def serve(contender: str, size: Size, train: dict[str, str], clock: str) -> None:
  """Answer the lines of the standard input: see `Contender`."""
  from tokenformer_jax.cli import heap  # noqa: PLC0415

  if heap.can_keep_freed_memory():  # as `tokenformer train` does, and so for PyTorch
    heap.keep_freed_memory()
  if contender == 'jax':
    run = jax_step(size, **train)
  else:
    run = torch_step(size, compiled=contender == 'torch_compiled')
  for line in sys.stdin:
    if line.strip() == 'memory':
      print(most_memory(contender), flush=True)
      continue
    start = CLOCKS[clock]()
    run()
    print(CLOCKS[clock]() - start, flush=True)


def measure(names: list[str], arguments: list[str], rounds: int) -> list[Contender]:
  """Return contenders that took turns, one step each, and have ended."""
  contenders = []
  for name in names:
    contender = Contender(__file__, name, arguments)
    warm_up = [contender.step() for _ in range(WARM_UP)]
    print(f'{name}: first step {warm_up[0]:.1f} s', file=sys.stderr, flush=True)
    contenders.append(contender)
  for _ in range(rounds):
    for contender in contenders:
      contender.seconds.append(contender.step())
  for contender in contenders:
    contender.note_memory()
    contender.close()
  return contenders


def main() -> None:
  """Run the contenders and print a table."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--size', choices=SIZES, default='cpu_22m')
  parser.add_argument('--batch', type=int, help='sequences or images in a step')
  parser.add_argument(
    '--train', action='append', default=[], metavar='KEY=VALUE', help='a value of config.train'
  )
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--contenders', default=','.join(CONTENDERS), help='names, comma-separated')
  parser.add_argument(
    '--apart', action='store_true', help='one contender after the other, for memory of one only'
  )
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  parser.add_argument('--serve', choices=CONTENDERS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  size = SIZES[args.size]
  if args.batch:
    size = dataclasses.replace(size, batch=args.batch)
  if args.serve:
    train = dict(value.split('=', 1) for value in args.train)
    serve(args.serve, size, train, args.clock)
    return
  arguments = [f'--size={args.size}', f'--batch={size.batch}', f'--clock={args.clock}']
  arguments += [f'--train={value}' for value in args.train]
  names = args.contenders.split(',')
  groups = [[name] for name in names] if args.apart else [names]
  contenders = [c for group in groups for c in measure(group, arguments, args.rounds)]
  report(contenders, args.size, size)


def report(contenders: list[Contender], name: str, size: Size) -> None:
  """Print the table."""
  import jax  # noqa: PLC0415 (not before the measurements)

  from tokenformer_jax.model import flops  # noqa: PLC0415

  model = model_config(size)
  per_input = flops.train_flops(model, size.length)
  step_flops = size.batch * per_input * (1 if size.image else size.length)
  peak = flops.peak_flops(jax.devices()[0])
  parameters = flops.matrix_parameters(model) + (0 if size.image else size.vocab_size * size.width)
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
  print(f'{"":16}{"median s":>10}{"least":>9}{"most":>9}{"TFLOP/s":>10}{"MFU":>8}{"GiB":>8}')
  for contender in contenders:
    seconds = sorted(contender.seconds)
    median = statistics.median(seconds)
    mfu = f'{step_flops / median / peak:.1%}' if peak else '–'
    memory = f'{contender.most_memory / 2**30:.2f}' if contender.most_memory else '–'
    print(
      f'{contender.name:16}{median:10.3f}{seconds[0]:9.3f}{seconds[-1]:9.3f}'
      f'{step_flops / median / 1e12:10.3f}{mfu:>8}{memory:>8}'
    )


if __name__ == '__main__':
  main()
