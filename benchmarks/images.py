r"""Measure the input pipeline's images a second on one core, against a training step's demand.

  python benchmarks/images.py                 our views, decoders, tf.data
  python benchmarks/images.py --workers=2     Grain's worker processes, whole batches

The images are scikit-learn's two photographs at ImageNet's average size, 500 × 375, as JPEG. The
views are those of configs/vit_imagenet.py: a random crop, a flip, RandAugment. Contenders take
turns, so that other load on the machine affects all of them. Contenders that are not installed do
not run (`pip install opencv-python-headless simplejpeg tensorflow-cpu`).
"""

import argparse
import dataclasses
import io
import runpy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn import datasets

from tokenformer_jax import config as config_lib
from tokenformer_jax.data import image_order, images, order
from tokenformer_jax.data.augment import Views, random_crop
from tokenformer_jax.model import flops

CONFIG = Path(__file__).parents[1] / 'configs/vit_imagenet.py'
ROUNDS, PER_ROUND = 15, 16
CHIPS = ('TPU v4', 'TPU v5', 'TPU v6e', 'NVIDIA H100')
MFU = 0.4


def photographs() -> list[bytes]:
  """Return JPEG files of 500 × 375 pixels."""
  files = []
  for pixels in datasets.load_sample_images().images:
    file = io.BytesIO()
    Image.fromarray(pixels).resize((500, 375)).save(file, 'jpeg', quality=92)
    files.append(file.getvalue())
  return files


def decoders() -> dict[str, Callable[[bytes], object]]:
  """Return functions that decode, crop at random and resize, for each installed library."""
  rng = np.random.default_rng(0)
  data = config_lib.ImagesConfig(crop_area=0.08)
  decoders: dict[str, Callable[[bytes], object]] = {
    'decode + crop, Pillow (ours)': lambda file: Views(data, 3).train(file, rng)
  }
  try:
    import cv2  # noqa: PLC0415
  except ImportError:
    return decoders
  cv2.setNumThreads(1)

  def crop(pixels: np.ndarray) -> np.ndarray:
    size = pixels.shape[1::-1]
    left, top, right, bottom = map(int, random_crop(size, 0.08, rng))
    part = pixels[top : bottom + 1, left : right + 1]
    return cv2.resize(part, (224, 224), interpolation=cv2.INTER_AREA)

  def opencv(file: bytes) -> np.ndarray:
    return crop(cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB))

  decoders['decode + crop, OpenCV'] = opencv
  try:
    import simplejpeg  # noqa: PLC0415
  except ImportError:
    return decoders
  decoders['decode + crop, simplejpeg'] = lambda file: crop(simplejpeg.decode_jpeg(file))
  return decoders


def pipelines() -> dict[str, Callable[[bytes], object]]:
  """Return functions for whole views of an image: ours, and tf.data's without RandAugment."""
  rng, data = np.random.default_rng(0), recipe().data
  decoders: dict[str, Callable[[bytes], object]] = {
    'training view, ours': lambda file: Views(data, 3).train(file, rng),
    'evaluation view, ours': lambda file: Views(data, 3).evaluation(file),
  }
  return decoders | tf_data()


def tf_data() -> dict[str, Callable[[bytes], object]]:
  """Return a random crop and a flip by TensorFlow, which has no RandAugment."""
  try:
    import tensorflow as tf  # noqa: PLC0415
  except ImportError:
    return {}
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  whole = tf.zeros((0, 0, 4))

  @tf.function(input_signature=[tf.TensorSpec((), tf.string)])
  def view(file):
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      tf.image.extract_jpeg_shape(file),
      whole,
      area_range=(0.08, 1),
      use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    part = tf.image.decode_and_crop_jpeg(file, window, channels=3)
    resized = tf.image.resize(part[None], (224, 224), 'bicubic')[0]
    return tf.cast(tf.image.random_flip_left_right(resized), tf.uint8)

  return {'decode + crop + flip, tf.data': lambda file: view(file).numpy()}


def recipe(**data: int) -> config_lib.Config:
  """Return the config configs/vit_imagenet.py:b16 with some values of its data."""
  values = runpy.run_path(str(CONFIG))['get_config']('b16')
  values.data.update(data)
  return config_lib.resolve(values.copy_and_resolve_references())


def time_views(files: list[bytes]) -> float:
  """Print a row for each contender; return images a second of our training view."""
  contenders = {**decoders(), **pipelines()}
  rates: dict[str, list[float]] = {name: [] for name in contenders}
  for _ in range(ROUNDS + 1):
    for name, view in contenders.items():
      start = time.perf_counter()
      for i in range(PER_ROUND):
        view(files[i % len(files)])
      rates[name].append(PER_ROUND / (time.perf_counter() - start))
  print('| one core | images/s, median | least | most |')
  print('|---|---|---|---|')
  for name, values in rates.items():
    values = values[1:]  # the first round warms up
    print(f'| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |')
  return statistics.median(rates['training view, ours'][1:])


class Photographs(images.Split):
  """A split that repeats a few files to the length of an epoch."""

  def __init__(self, files: list[bytes]):
    self.files = files

  def __len__(self) -> int:
    return 10_000

  def read(self, number: int) -> tuple[bytes, int]:
    return self.files[number % len(self.files)], number % 10

  def name(self, number: int) -> str:
    return str(number)

  key = name


def time_workers(files: list[bytes], workers: int) -> None:
  """Print images a second of whole batches from worker processes."""
  data = recipe(batch_size=64, workers=workers, prefetch=2 * workers).data
  steps = image_order.Batches(
    split=Photographs(files),
    views=Views(data, 3),
    classes=10,
    rows=range(64),
    numbers=range(10**6),
    seed=0,
  )
  batches = order.read_ahead(steps, 0, data)
  for _ in range(2 * workers):  # start-up
    next(batches)
  start, count = time.perf_counter(), 6 * workers
  for _ in range(count):
    next(batches)
  rate = 64 * count / (time.perf_counter() - start)
  batches.close()
  print(f'{workers} worker processes: {rate:.0f} images/s')


def main() -> None:
  """Measure and print the rates."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workers', type=int, default=0)
  args = parser.parse_args()
  files = photographs()
  if args.workers:
    time_workers(files, args.workers)
    return
  rate, config = time_views(files), recipe()
  model = dataclasses.replace(config.model, classes=1000, channels=3)
  per_image = flops.train_flops(model, flops.length(config))
  print(f'\nA step of b16 takes {per_image / 1e9:.0f} GFLOP an image. At {MFU:.0%} MFU:\n')
  print('| chip | images/s needed | cores like this one that deliver them |')
  print('|---|---|---|')
  for chip in CHIPS:
    asked = flops.PEAK_TFLOPS[chip] * 1e12 * MFU / per_image
    print(f'| {chip} | {asked:.0f} | {asked / rate:.1f} |')


if __name__ == '__main__':
  main()
