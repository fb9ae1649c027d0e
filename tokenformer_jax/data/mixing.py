"""Mix two images of a batch into one: mixup and cutmix, on the devices."""

import jax
import jax.numpy as jnp


def mix(
  key: jax.Array, images_BxHxWxC: jax.Array, *, mixup: float, cutmix: float
) -> tuple[jax.Array, jax.Array]:
  """Mix every image with the image of the mirrored row, B − 1 − row.

  mixup (Zhang et al. 2017, arXiv 1710.09412) adds the two images with weights λ and 1 − λ. cutmix
  (Yun et al. 2019, arXiv 1905.04899) pastes a rectangle of the other image. λ is drawn once per
  batch from Beta(α, α), with `mixup` or `cutmix` as α; 0 turns either off. If both are on, each
  batch uses one of them at random.

  Returns:
    The mixed images, and the weight λ of each image's own label. The other label has 1 − λ.
  """
  if not (mixup or cutmix):
    return images_BxHxWxC, jnp.ones(())
  choice, weight, centre = jax.random.split(key, 3)
  others_BxHxWxC = jnp.flip(images_BxHxWxC, axis=0)

  def mixed_up() -> tuple[jax.Array, jax.Array]:
    own = jax.random.beta(weight, mixup, mixup)
    return own * images_BxHxWxC + (1 - own) * others_BxHxWxC, own

  def cut() -> tuple[jax.Array, jax.Array]:
    height, width = images_BxHxWxC.shape[1:3]
    own = jax.random.beta(weight, cutmix, cutmix)
    inside_HxW = _rectangle(centre, height, width, 1 - own)
    pasted = jnp.where(inside_HxW[None, :, :, None], others_BxHxWxC, images_BxHxWxC)
    return pasted, 1 - jnp.mean(inside_HxW)  # The border may have cut the rectangle.

  if not cutmix:
    return mixed_up()
  if not mixup:
    return cut()
  return jax.lax.cond(jax.random.bernoulli(choice), mixed_up, cut)


def _rectangle(key: jax.Array, height: int, width: int, area: jax.Array) -> jax.Array:
  """Return a mask [H, W] of a rectangle with a share of the image's area, around a random point."""
  point = jax.random.uniform(key, (2,))
  half = jnp.sqrt(area) / 2

  def within(size: int, centre: jax.Array) -> jax.Array:
    first, last = (jnp.round(size * jnp.clip(centre + d, 0, 1)) for d in (-half, half))
    return (jnp.arange(size) >= first) & (jnp.arange(size) < last)

  return within(height, point[0])[:, None] & within(width, point[1])[None, :]
