"""An HTTP server of this process, for stand-ins of the services that the package asks."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar


class Handler(http.server.BaseHTTPRequestHandler):
  """Notes every call in `server.asked`, and answers by `answer`."""

  protocol_version = 'HTTP/1.1'
  wbufsize = -1  # An answer in two packets waits 40 ms for the client to acknowledge the first.
  server: 'Server'

  def answer(self, body: bytes) -> None:
    raise NotImplementedError

  def _answer(self) -> None:
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    self.server.asked.append(f'{self.command} {self.path} {self.headers.get("Range", "")}'.strip())
    self.answer(body)

  do_HEAD = do_GET = do_POST = do_PUT = do_DELETE = _answer

  def send(
    self, status: int, content: Any, headers: Mapping[str, str] = {}, sent: int | None = None
  ) -> None:
    """Send bytes, or a value as JSON; or `sent` bytes of it and the end of the connection."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    self.send_response(status)
    for name, value in {**headers, 'Content-Length': str(len(body))}.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(body[:sent])
    if sent is not None:
      self.close_connection = True

  def log_message(self, *args):
    del args


class Server(http.server.ThreadingHTTPServer):
  """A server at a free port."""

  daemon_threads = True

  def __init__(self, handler: type[Handler]):
    super().__init__(('127.0.0.1', 0), handler)
    self.asked: list[str] = []  # METHOD PATH RANGE of calls

  def handle_error(self, *arguments):
    del arguments  # A client that has enough goes.

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.server_port}'


_S = TypeVar('_S', bound=Server)


@contextlib.contextmanager
def serving(server: _S) -> Iterator[_S]:
  """Run a server."""
  with server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
