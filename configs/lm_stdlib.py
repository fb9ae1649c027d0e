from tokenformer_jax import config


def get_config():
  c = config.defaults()
  return c
