"""TensorFlow Datasets sets in `array_record` files, of text and of images alike."""

from tokenformer_jax.errors import UserError


def cannot_be_opened(name: str, error: Exception) -> UserError:
  """What to say when TFDS cannot open the set `tfds:NAME`, of which it says so in many ways."""
  reason = str(error).strip().partition('\n')[0]
  return UserError(
    f'config.data.source is tfds:{name}, which cannot be opened ({reason}); prepare it with '
    f'`tfds build {name} --file_format=array_record`, or point the environment variable '
    'TFDS_DATA_DIR at the folder where it is prepared in that format'
  )
