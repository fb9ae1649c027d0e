"""Define the models of the benchmarks, and contenders that take turns, each in its own process."""

import dataclasses
import subprocess
import sys
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Size:
  """The sizes of a TokenFormer and of its training batch: a language model, or a ViT if `image`."""

  layers: int
  width: int
  heads: int
  vocab_size: int  # or classes
  qkv: int
  proj: int
  ffn: int
  reference_qkv: int
  length: int  # in tokens, or patches
  batch: int
  image: int = 0  # its side in pixels


# The clocks of --clock. The processor's counts the time of this process alone, so other load
# matters little. Use one core: threads that spin while they wait count as well.
CLOCKS = {'wall': time.perf_counter, 'processor': time.process_time}

SIZES = {
  'tiny': Size(2, 64, 2, 512, 64, 64, 256, 64, length=64, batch=2),
  'cpu_22m': Size(8, 384, 6, 8192, 384, 384, 1536, 384, length=512, batch=4),
  'default': Size(3, 192, 3, 2048, 192, 192, 768, 192, length=128, batch=8),  # lm_stdlib
  '150m': Size(12, 768, 12, 50304, 768, 768, 3072, 768, length=2048, batch=16),
  '1_5b': Size(40, 1536, 16, 50304, 1536, 1536, 6144, 1536, length=2048, batch=4),
  'grown_1_4b': Size(12, 768, 12, 50304, 8620, 8620, 34480, 576, length=1024, batch=8),
  'b16': Size(12, 768, 12, 1000, 768, 768, 3072, 768, length=196, batch=256, image=224),
}
PATCH, CHANNELS = 16, 3


def model_config(size: Size) -> Any:
  """Return our `ModelConfig` of a size."""
  from tokenformer_jax import config  # noqa: PLC0415 (each process loads one framework)
  from tokenformer_jax.config import mixers  # noqa: PLC0415

  reference = size.reference_qkv
  mixer = config.SoftmaxConfig(
    heads=size.heads,
    qkv=config.PattentionConfig(size.qkv, reference),
    proj=config.PattentionConfig(size.proj, reference),
  )
  ffn, pattern = config.PattentionConfig(size.ffn, 4 * reference), f'layer*{size.layers}'
  if size.image:
    mixer = dataclasses.replace(mixer, positions=mixers.NoPositionsConfig())
    layer = config.LayerConfig(mixer, ffn)
    images = {'patch': PATCH, 'channels': CHANNELS, 'classes': size.vocab_size}
    images['position_embedding'] = 'sincos'
    return config.ViTConfig(pattern=pattern, width=size.width, layer=layer, **images)
  layer = config.LayerConfig(mixer, ffn)
  return config.LMConfig(pattern=pattern, width=size.width, layer=layer, vocab_size=size.vocab_size)


def train_config(size: Size) -> Any:
  """Return the config of a size with its batches, as a `ConfigDict`, with defaults otherwise."""
  from tokenformer_jax import config  # noqa: PLC0415

  kind, data = 'text', {'sequence_length': size.length}
  if size.image:
    kind, data = 'images', {'image_size': size.image}
  values = config.defaults(model=config.to_json(model_config(size)), data=kind)
  values.data.update(batch_size=size.batch, **data)
  return values


def torch_model(size: Size) -> Any:
  """Return the same model in PyTorch, on the GPU if there is one."""
  import torch  # noqa: PLC0415
  from torch_tokenformer import Sizes, TokenFormer, ViT  # noqa: PLC0415

  names = ('layers', 'width', 'heads', 'vocab_size', 'qkv', 'proj', 'ffn')
  sizes = Sizes(**{name: getattr(size, name) for name in names}, max_length=size.length)
  if size.image:
    sizes = dataclasses.replace(sizes, rotary_fraction=0.0)
    model = ViT(sizes, PATCH, CHANNELS)
  else:
    model = TokenFormer(sizes)
  return model.to('cuda' if torch.cuda.is_available() else 'cpu')


class Contender:
  """A process that makes a step on request.

  With `--serve=name` and the arguments, the script prints the seconds of a step for every line of
  its input. For the line `memory`, after which only `note_memory` asks, it prints that number.
  """

  def __init__(self, script: str, name: str, arguments: list[str]):
    self.name, self.seconds, self.most_memory = name, [], 0.0
    self._process = subprocess.Popen(
      [sys.executable, script, f'--serve={name}', *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def step(self) -> float:
    """Make one step and return its seconds."""
    return self._ask('step')

  def note_memory(self) -> None:
    """Set `most_memory`, the most bytes of the device's memory that the process has had, or 0."""
    self.most_memory = self._ask('memory')

  def _ask(self, line: str) -> float:
    self._process.stdin.write(f'{line}\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      sys.exit(f'{self.name} failed; see its message above')
    return float(answer)

  def close(self) -> None:
    """End the process."""
    self._process.stdin.close()
    self._process.wait()
