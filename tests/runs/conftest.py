"""Storage that fails for a while, for the tests of runs."""

import pytest

from tokenformer_jax.storage import retry


@pytest.fixture
def short_pauses(monkeypatch):
  monkeypatch.setattr(retry, 'PAUSES', (0.01,) * 4)


@pytest.fixture
def fail(monkeypatch):
  """Has a function raise errors, one in each call, before it works again."""

  def install(owner, name, errors, when=lambda *arguments: True):
    right, left = getattr(owner, name), iter(errors)

    def failing(*arguments, **named):
      if when(*arguments) and (error := next(left, None)) is not None:
        raise error
      return right(*arguments, **named)

    monkeypatch.setattr(owner, name, failing)

  return install
