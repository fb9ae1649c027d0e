"""One process of `commands_server` for all tests of a worker."""

from collections.abc import Iterator

import commands_server
import pytest


@pytest.fixture(scope='session')
def server() -> Iterator[commands_server.Server]:
  made = commands_server.Server()
  yield made
  made.close()
