"""Train image classifiers."""

import hashlib
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax.config import Config
from tokenformer_jax.data import image_order, images, order
from tokenformer_jax.data.augment import Views, mix
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.model import vit
from tokenformer_jax.model.layer import Context, Counts, LayerInputs
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import hosts
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.tasks.task import (
  Batch,
  EvalSums,
  Figures,
  Task,
  check_enough,
  layer_keys,
  with_aux,
)

_TOP = 5
_BINS = 15  # bins of confidence for the calibration error
_MOST_NAMED = 20  # the most bad images to name; more are only counted


class ImageSums(NamedTuple):
  """Sums over the images of a batch that count; `bin_…` [15] are by confidence. Batches add up."""

  nats: jax.Array  # Σ −log p(label)
  images: jax.Array
  correct: jax.Array  # images whose label has the largest logit
  correct_top5: jax.Array  # images whose label has one of the five largest logits
  bin_images: jax.Array
  bin_confidence: jax.Array  # Σ of the largest probability
  bin_correct: jax.Array


class ImageTask(Task):
  """The prediction of an image's class.

  Batches are a dict: images uint8 [B, S, S, C] and labels int32 [B]; −1 marks ignored images.
  """

  _set: images.ImageSet  # set by `prepare`

  def __init__(self, config: Config, *vocabulary: Any):
    super().__init__(config, *vocabulary)
    data: Any = config.data  # its section for images
    self._views = Views(data, config.model.channels)
    self._bad: dict[str, set[int]] = {'train': set(), 'validation': set()}

  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    data, channels = self.config.data, self.config.model.channels
    shape = data.batch_size, data.image_size, data.image_size, channels
    return {
      'images': jax.ShapeDtypeStruct(shape, jnp.uint8),
      'labels': jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    }

  def loss(
    self,
    params: Params,
    batch: Batch,
    key: jax.Array,
    *teacher: Params,
    counts: Counts | None = None,
  ) -> tuple[jax.Array, Figures]:
    model, data, counts = self.config.model, self.config.data, counts or self.counts(batch)
    mix_key, path_key, layers_key = jax.random.split(key, 3)
    pixels = _around_zero(batch['images'])
    pixels, own = mix(mix_key, pixels, mixup=data.mixup, cutmix=data.cutmix)
    labels_B, counts_B = batch['labels'], self._counted(batch)
    targets_BxC = optax.smooth_labels(jax.nn.one_hot(labels_B, model.classes), data.label_smoothing)
    if data.mixup or data.cutmix:
      targets_BxC = own * targets_BxC + (1 - own) * targets_BxC[::-1]
    inputs = LayerInputs(key=layer_keys(model, layers_key))
    if model.drop_path:
      scales = vit.branch_scales(path_key, model.depth, len(labels_B), model.drop_path)
      inputs = inputs._replace(branch_scales_Bx2=scales)
    logits_BxC, aux = self.definition.bind(params)(pixels, Context(training=True), inputs)
    losses_B = optax.softmax_cross_entropy(logits_BxC, targets_BxC)
    loss = jnp.sum(losses_B * counts_B) / jnp.maximum(1, counts.targets)
    return with_aux(loss, loss, aux, counts)

  def counts(self, batch: Batch) -> Counts:
    return self._with_tokens(jnp.sum(self._counted(batch)), batch)

  def _counted(self, batch: Batch) -> jax.Array:
    """Return whether each image of a training batch counts: not if it, or one mixed in, is bad."""
    counts_B, data = batch['labels'] >= 0, self.config.data
    return counts_B & counts_B[::-1] if data.mixup or data.cutmix else counts_B

  def _with_tokens(self, images: jax.Array, batch: Batch) -> Counts:
    """Return counts; layers see all images of a batch, bad ones as well."""
    rows, size = batch['images'].shape[:2]
    model = self.config.model
    tokens = (size // model.patch) ** 2 + (model.pool == 'token')
    return Counts(images, *map(jnp.int32, (rows * tokens, rows)))

  def sums(self, params: Params, batch: Batch, *teacher: Params) -> EvalSums:
    del teacher
    logits_BxC, aux = self.definition.bind(params)(_around_zero(batch['images']))
    labels_B = batch['labels']
    counts_B = (labels_B >= 0).astype(jnp.float32)
    labels_B = jnp.maximum(labels_B, 0)
    at_label_Bx1 = jnp.take_along_axis(logits_BxC, labels_B[:, None], axis=1)
    # Among equal logits the first one ranks higher, so that a constant model is right by chance.
    first = jnp.arange(logits_BxC.shape[1])[None] < labels_B[:, None]
    larger = (logits_BxC > at_label_Bx1) | ((logits_BxC == at_label_Bx1) & first)
    rank_B = jnp.sum(larger, axis=1)
    correct_B = counts_B * (rank_B == 0)
    confidence_B = jnp.max(jax.nn.softmax(logits_BxC), axis=1)
    bins_B = jnp.minimum(_BINS - 1, (confidence_B * _BINS).astype(jnp.int32))
    in_bin_BxN = jax.nn.one_hot(bins_B, _BINS) * counts_B[:, None]
    losses_B = jax.nn.logsumexp(logits_BxC, axis=1) - at_label_Bx1[:, 0]
    sums = ImageSums(
      nats=jnp.sum(counts_B * losses_B),
      images=jnp.sum(counts_B),
      correct=jnp.sum(correct_B),
      correct_top5=jnp.sum(counts_B * (rank_B < _TOP)),
      bin_images=jnp.sum(in_bin_BxN, axis=0),
      bin_confidence=confidence_B @ in_bin_BxN,
      bin_correct=correct_B @ in_bin_BxN,
    )
    return EvalSums(sums, aux, self._with_tokens(sums.images, batch))

  def logits(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return self.definition.bind(params)(_around_zero(batch['images']))[0], batch['labels']

  def prepare(self) -> None:
    self._set = hosts.first_then_others(lambda: images.open_images(self.config.data))
    sizes = [len(self._set.train), len(self._set.validation), len(self._set.classes)]
    hosts.check_same(sizes, 'the hosts find different images; config.data must find the same')

  @property
  def examples(self) -> int:
    return len(self._set.train)

  @property
  def digests(self) -> tuple[str, ...]:
    """Return a hash of the classes and the numbers of images, without reading pixels."""
    data = self._set
    identity = repr((data.classes, len(data.train), len(data.validation)))
    return (hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),)

  @property
  def other_meaning(self) -> str:
    ours, theirs = self._set.classes, (self._trained_vocabulary or {}).get('classes')
    if theirs is None or list(ours) == theirs:
      return ''
    if len(ours) != len(theirs):
      return f'the data has {len(ours)} classes, and the model was trained for {len(theirs)}'
    differing = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1]
    i = differing[0]
    return (
      f'{len(differing)} of its {len(ours)} classes stand for something else in the data: class '
      f'{i} is {ours[i]!r} there, and the model was trained with {theirs[i]!r}'
    )

  def at_stage(self, data: Any) -> Self:
    stage = super().at_stage(data)
    stage._views = Views(data, self.config.model.channels)
    return stage

  def train_batches(
    self,
    rows: Sequence[int],
    first_step: int,
    last_step: int,
    position: order.Position = order.BEGINNING,
  ) -> Generator[Batch, None, None]:
    batches = image_order.Batches(
      split=self._set.train,
      views=self._views,
      classes=self.config.model.classes,
      rows=rows,
      numbers=range(last_step),
      seed=self.config.train.seed,
      position=position,
    )
    return self._report_bad('train', batches, first_step)

  def validation_parts(self, rows: Sequence[int]) -> dict[str, Iterator[Batch]]:
    split, size = self._set.validation, self._views.data.batch_size
    batches = image_order.Batches(
      split=split,
      views=self._views,
      classes=self.config.model.classes,
      rows=rows,
      numbers=order.spread(self.config.train.eval_batches, math.ceil(len(split) / size)),
    )
    return {'': self._report_bad('validation', batches)}

  def held_out(
    self, vocabulary: dict[str, Any], count: int, first: int = 0, *, repeat: bool = True
  ) -> tuple[Batch, str]:
    """Return validation images of the run if they are on this machine, or noise."""
    del vocabulary
    try:
      split = images.open_images(self.config.data).validation
    except UserError:
      return self._noise(count, first)
    if not repeat:
      check_enough(count, first, len(split), 'images')
    try:
      loaded = [
        image_order.load(split, i % len(split), self._views, self.config.model.classes, None)
        for i in range(first, first + count)
      ]
    except (UserError, image_order.BadImageError):
      return self._noise(count, first)
    pixels, labels = zip(*loaded, strict=True)
    batch = {'images': np.stack(pixels), 'labels': np.array(labels, np.int32)}
    return batch, f'{counted(count, "held-out image")} of the run'

  def _noise(self, count: int, first: int) -> tuple[Batch, str]:
    """Return images of noise and labels in turn, with their description."""
    size, model = self.config.data.image_size, self.config.model
    rng = np.random.default_rng(first)
    pixels = rng.integers(0, 256, (count, size, size, model.channels), np.uint8)
    labels = np.int32(np.arange(first, first + count) % model.classes)
    return {'images': pixels, 'labels': labels}, f'{counted(count, "image")} of noise'

  def vocabulary(self) -> dict[str, Any]:
    return {'classes': list(self._set.classes)}

  def describe_data(self) -> str:
    return f'{counted(self.examples, "image")} of {counted(len(self._set.classes), "class")}'

  def train_figures(self, loss: float) -> dict[str, float]:
    """Return the number of different images that this host could not use so far, if any."""
    del loss
    return {f'data/bad_{name}_images': float(len(bad)) for name, bad in self._bad.items() if bad}

  def eval_figures(self, sums: EvalSums) -> dict[str, float]:
    own: ImageSums = sums.task
    n = own.images
    figures: dict[str, Any] = {
      'loss': own.nats / n,
      'accuracy': own.correct / n,
      'calibration_error': np.sum(np.abs(own.bin_correct - own.bin_confidence)) / n,
      'images': n,
      **sums.layer_figures(),
    }
    if self.config.model.classes > _TOP:
      figures['top5_accuracy'] = own.correct_top5 / n
    return figures

  def _report_bad(
    self, name: str, source: image_order.Batches, first: int = 0
  ) -> Generator[Batch, None, None]:
    """Yield batches, read ahead; report their bad images, or fail if `on_bad_image` is `fail`."""
    split, batches = source.split, order.read_ahead(source, first, source.views.data)
    try:
      for batch in batches:
        bad = batch.pop('bad')
        for number in bad:
          if number >= 0 and int(number) not in self._bad[name]:
            self._report_image(name, split, int(number))
        if len(bad) > 1 and np.all(bad >= 0):
          raise UserError(
            f'none of the {len(bad)} images of a batch can be used; the first is '
            f'{split.name(int(bad[0]))} ({self._reason(split, int(bad[0]))}); something is wrong '
            'with all of them'
          )
        yield batch
    finally:
      batches.close()

  def _report_image(self, name: str, split: images.Split, number: int) -> None:
    seen, reason = self._bad[name], self._reason(split, number)
    seen.add(number)
    if self.config.data.on_bad_image == 'fail':
      raise UserError(
        f'the image {split.name(number)} cannot be used ({reason}); repair or remove it, or set '
        'config.data.on_bad_image=skip'
      )
    if len(seen) <= _MOST_NAMED:
      more = '; more bad images are only counted' if len(seen) == _MOST_NAMED else ''
      say(f'the image {split.name(number)} is left out ({reason}){more}')

  def _reason(self, split: images.Split, number: int) -> str:
    """Read an image again and return why it cannot be used."""
    try:
      classes, rng = self.config.model.classes, np.random.default_rng(0)
      image_order.load(split, number, self._views, classes, rng)
      return 'it could not be read just now'
    except image_order.BadImageError as error:
      return str(error)


def _around_zero(images_BxHxWxC: jax.Array) -> jax.Array:
  """Scale pixels to −1 … 1."""
  return images_BxHxWxC.astype(jnp.float32) / 127.5 - 1
