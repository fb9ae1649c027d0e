"""Points of a known law, with noise and outliers."""

import numpy as np

from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.points import Points

# Hoffmann et al. (2022), approach 3.
PUBLISHED = {'E': 1.69, 'A': 406.4, 'B': 410.7, 'alpha': 0.34, 'beta': 0.28}
FEW_STARTS = formulas.starts()[7::90]


def points(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> Points:
  """Return points with names."""
  return Points(tuple(f'run {i}' for i in range(len(n))), n, d, loss)


def scattered(count: int, *, noise: float = 0.002, seed: int = 0) -> Points:
  """Return points of the published law: N 1e7 to 1e10, D 1e9 to 3e11 (SPEC 4.4)."""
  rng = np.random.default_rng(seed)
  n = np.exp(rng.uniform(np.log(1e7), np.log(1e10), count))
  d = np.exp(rng.uniform(np.log(1e9), np.log(3e11), count))
  loss = formulas.loss(PUBLISHED, n, d) * np.exp(noise * rng.normal(size=count))
  return points(n, d, loss)


def on_grid(sizes: int = 9, lengths: int = 8, noise: float = 0.0, seed: int = 0) -> Points:
  """Return points of the published law on a grid of sizes and lengths."""
  rng = np.random.default_rng(seed)
  n, d = np.meshgrid(np.geomspace(3e7, 3e10, sizes), np.geomspace(1e9, 3e12, lengths))
  n, d = n.ravel(), d.ravel()
  return points(n, d, formulas.loss(PUBLISHED, n, d) * np.exp(noise * rng.normal(size=n.size)))
