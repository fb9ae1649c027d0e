r"""Time one token of decoding: ours, a plain PyTorch loop with a cache, and `transformers`.

  python benchmarks/decode.py                                   152M parameters on the CPU
  python benchmarks/decode.py --size=1_5b --batches=1,8,64      on one GPU, bfloat16
  python benchmarks/decode.py --draw=default                    without the loop, which is greedy

Needs `pip install -e ".[benchmark]"`. The contenders write text after prompts of `--prompt`
tokens. All prompts have the same length, as the PyTorch loop requires. Each contender has its own
process, and they take turns, one text each. Only tokens after the first 16 count, which excludes
reading the prompts and compiling. The command prints milliseconds per token (median, least, most)
and tokens/s of the batch. `--clock` is that of benchmarks/train_step.py.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from contenders import CLOCKS, SIZES, Contender, Size, model_config, torch_model

CHUNK = 16


def jax_text(
  size: Size, batch: int, prompt: int, length: int, clock: Callable[[], float], draw: str
) -> Callable[[], float]:
  """Return a function that writes a batch of texts with ours and returns the seconds per token."""
  import jax  # noqa: PLC0415 (each process loads one of the two frameworks)
  import numpy as np  # noqa: PLC0415

  from tokenformer_jax.config import Config  # noqa: PLC0415
  from tokenformer_jax.decoding.decode import Decoder, Request  # noqa: PLC0415
  from tokenformer_jax.decoding.sampling import DEFAULT, GREEDY  # noqa: PLC0415
  from tokenformer_jax.model.lm import Execution, define_lm  # noqa: PLC0415

  model = model_config(size)
  decoder = Decoder(model, Execution.from_config(Config(model=model)))
  params = decoder.prepare(jax.jit(define_lm(model).init)(jax.random.key(0)))
  prompts = np.random.default_rng(0).integers(0, size.vocab_size, (batch, prompt))
  sampling = GREEDY if draw == 'greedy' else DEFAULT
  requests = [Request(ids.tolist(), length, sampling) for ids in prompts]

  def run() -> float:
    times = [clock() for _ in decoder.chunks(params, requests, chunk=CHUNK)]
    return (times[-1] - times[0]) / (length - CHUNK)

  return run


def torch_text(
  size: Size, batch: int, prompt: int, length: int, clock: Callable[[], float], draw: str
) -> Callable[[], float]:
  """Return the same function for PyTorch, which takes the likeliest tokens."""
  assert draw == 'greedy', draw
  import torch  # noqa: PLC0415

  model = torch_model(size)
  model = model.bfloat16() if torch.cuda.is_available() else model
  prompts = torch.randint(size.vocab_size, (batch, prompt), device=model.embedding.weight.device)

  def run() -> float:
    times = []
    model.decode(prompts, length, lambda: times.append(clock()))
    return (times[-1] - times[CHUNK - 1]) / (length - CHUNK)

  return run


def transformers_text(
  size: Size, batch: int, prompt: int, length: int, clock: Callable[[], float], draw: str
) -> Callable[[], float]:
  """Return the same function for `transformers`: a GPT-NeoX with a static cache, compiled.

  Its width, depth, heads and vocabulary are the model's, and the neurons of its feed-forward are as
  many as give it the same number of parameters.
  """
  import torch  # noqa: PLC0415
  from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, StaticCache  # noqa: PLC0415
  from transformers.generation import logits_process  # noqa: PLC0415

  config = GPTNeoXConfig(
    vocab_size=size.vocab_size,
    hidden_size=size.width,
    num_hidden_layers=size.layers,
    num_attention_heads=size.heads,
    intermediate_size=3 * size.qkv + size.proj + size.ffn - 2 * size.width,
    tie_word_embeddings=True,
  )
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model: Any = GPTNeoXForCausalLM(config)
  model = model.eval().to(device)
  model = model.bfloat16() if device == 'cuda' else model
  prompts = torch.randint(size.vocab_size, (batch, prompt), device=device)
  next_token = torch.compile(model, dynamic=False)
  warpers = [
    logits_process.TemperatureLogitsWarper(0.8),
    logits_process.TopPLogitsWarper(0.95),
  ]

  def choose(logits_BxV: Any) -> Any:
    if draw == 'greedy':
      return logits_BxV.argmax(dim=-1, keepdim=True)
    for warp in warpers:
      logits_BxV = warp(None, logits_BxV)
    return torch.multinomial(logits_BxV.softmax(dim=-1), 1)

  @torch.inference_mode()
  def run() -> float:
    cache, ids, apply, times = StaticCache(config, prompt + length), prompts, model, []
    for _ in range(length):
      logits = apply(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
      ids, apply = choose(logits[:, -1].float()), next_token
      if device == 'cuda':
        torch.cuda.synchronize()
      times.append(clock())
    return (times[-1] - times[CHUNK - 1]) / (length - CHUNK)

  return run


TEXTS = {'jax': jax_text, 'torch': torch_text, 'transformers': transformers_text}


def main() -> None:
  """Run the contenders in turns and print a table."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--size', choices=SIZES, default='150m')
  parser.add_argument('--batches', default='1,8', help='batch sizes, separated by commas')
  parser.add_argument('--prompt', type=int, default=128, help='tokens of each prompt')
  parser.add_argument('--length', type=int, default=64, help='tokens to write; a multiple of 16')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  parser.add_argument('--draw', choices=('greedy', 'default'), default='greedy')
  parser.add_argument('--serve', choices=TEXTS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.length % CHUNK or args.length < 2 * CHUNK:
    sys.exit(f'--length={args.length} must be a multiple of {CHUNK} and at least {2 * CHUNK}')
  if args.serve:
    clock = CLOCKS[args.clock]
    run = TEXTS[args.serve](
      SIZES[args.size], int(args.batches), args.prompt, args.length, clock, args.draw
    )
    for _ in sys.stdin:
      print(run(), flush=True)
    return
  print(f'{args.size}, prompts of {args.prompt} tokens, {args.length} written')
  print(f'{"batch":>5} {"":13}{"median ms":>10}{"least":>8}{"most":>8}{"tokens/s":>10}')
  for batch in map(int, args.batches.split(',')):
    options = {'size': args.size, 'batches': batch, 'prompt': args.prompt, 'length': args.length}
    options |= {'clock': args.clock, 'draw': args.draw}
    arguments = [f'--{name}={value}' for name, value in options.items()]
    names = [name for name in TEXTS if name != 'torch' or args.draw == 'greedy']
    contenders = [Contender(__file__, name, arguments) for name in names]
    for contender in contenders:
      contender.step()  # The first step compiles.
    for _ in range(args.rounds):
      for contender in contenders:
        contender.seconds.append(contender.step())
    for contender in contenders:
      contender.close()
      low, *_, high = sorted(contender.seconds)
      median = statistics.median(contender.seconds)
      print(
        f'{batch:5} {contender.name:13}{median * 1e3:10.1f}{low * 1e3:8.1f}{high * 1e3:8.1f}'
        f'{batch / median:10.1f}'
      )


if __name__ == '__main__':
  main()
