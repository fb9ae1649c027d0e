"""Parse values over steps, such as the batch size: points STEP:VALUE."""

from collections.abc import Callable
from typing import TypeVar

from tokenformer_jax.errors import UserError

_T = TypeVar('_T')


def parse(text: str, path: str, value: Callable[[str], _T], example: str) -> dict[int, _T]:
  """Return the value from each step on; `path` names the key, and `value` reads a value."""
  pairs = [point.partition(':') for point in text.split()]
  try:
    points = {int(step): value(number) for step, _, number in pairs}
  except (ValueError, ZeroDivisionError):  # 1/0 as a fraction
    points = {}
  steps = [*points]
  if not steps or steps != sorted(steps) or steps[0] < 0 or len(steps) < len(pairs):
    raise UserError(
      f'{path} is {text!r}; it must be points STEP:NUMBER with ascending steps, for example '
      f'"{example}"'
    )
  return points
