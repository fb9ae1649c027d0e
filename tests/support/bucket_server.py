"""A stand-in for Google Cloud Storage: what its JSON API does for gcsfs and TensorStore, in memory.

Objects have generations, and writes the preconditions on them, as the API's documentation says:
cloud.google.com/storage/docs/json_api/v1. Some calls fail, where a test asks for it (`Faults`).
"""

import contextlib
import dataclasses
import email
import itertools
import json
import random
import re
import threading
import urllib.parse
from collections.abc import Iterator

import local_server

_OBJECT = re.compile(r'(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)')
_LIST = re.compile(r'/storage/v1/b/([^/]+)/o/?')
_UPLOAD = re.compile(r'/upload/storage/v1/b/([^/]+)/o/?')
_MOVE = re.compile(r'/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)')


CUT = 0  # for a status: the connection is closed without an answer


@dataclasses.dataclass
class Faults:
  """Choose the calls that fail, and how: the same for the same seed and order of calls.

  Attributes:
    one_in: of so many calls that match, one fails by chance. 1: each of them.
    statuses: to choose from: 503, 429, 500, 403 and so on, or `CUT`.
    methods: of HTTP; reading is GET, writing POST, PUT and DELETE.
    matching: a pattern that is found in the path, with its query, of a call that may fail.
    most: how many calls fail in all, if not None.
    seed: of the choice.
    failed: the calls that failed, as METHOD PATH.
  """

  one_in: int = 1
  statuses: tuple[int, ...] = (503,)
  methods: tuple[str, ...] = ('GET', 'POST', 'PUT', 'DELETE')
  matching: str = ''
  most: int | None = None
  seed: int = 0
  failed: list[str] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    self._random = random.Random(self.seed)

  def status(self, method: str, path: str) -> int | None:
    """The status with which a call fails, or None."""
    if method not in self.methods or not re.search(self.matching, urllib.parse.unquote(path)):
      return None
    if self._random.randrange(self.one_in) or len(self.failed) == self.most:
      return None
    self.failed.append(f'{method} {path}')
    return self._random.choice(self.statuses)


class Server(local_server.Server):
  """Buckets and their objects, each as its generation and its content."""

  def __init__(self, bucket: str):
    super().__init__(_Handler)
    self.lock = threading.RLock()
    self.buckets: dict[str, dict[str, tuple[int, bytes]]] = {bucket: {}}
    self.generations, self.uploads = itertools.count(1), {}
    self.faults: Faults | None = None

  @property
  def environment(self) -> dict[str, str]:
    """Return the variables by which gcsfs and TensorStore use this server as Google's."""
    return {
      'STORAGE_EMULATOR_HOST': self.url,
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'a-token',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # It asks another server.
      'no_proxy': '127.0.0.1',
    }

  @contextlib.contextmanager
  def failing(self, **how) -> Iterator[Faults]:
    """Has calls fail inside, as `Faults` with these attributes says."""
    with self.lock:
      self.faults = Faults(**how)
    try:
      yield self.faults
    finally:
      with self.lock:
        self.faults = None


def serving(bucket: str) -> contextlib.AbstractContextManager[Server]:
  """Run a server with one bucket."""
  return local_server.serving(Server(bucket))


class _Handler(local_server.Handler):
  server: Server

  def answer(self, body: bytes) -> None:
    with self.server.lock:
      faults = self.server.faults
      status = faults.status(self.command, self.path) if faults else None
      if status == CUT:
        self.close_connection = True
        return
      if status is None:
        status, headers, content = self._do(self.command, self.path, self.headers, body)
      else:
        said = {'error': {'code': status, 'message': 'this call was made to fail'}}
        status, headers, content = _json(said, status)
    self.send(status, content, headers)

  def _do(self, method, target, headers, body):
    """Status, headers and content of the answer."""
    path, _, query = target.partition('?')
    query = dict(urllib.parse.parse_qsl(query))
    path = re.sub(r'^/+', '/', path)
    if path.startswith('/batch/'):
      return self._batch(headers, body)
    if found := _MOVE.fullmatch(path):
      bucket, name, new_name = map(urllib.parse.unquote, found.groups())
      if name not in self.server.buckets.get(bucket, {}):
        return _MISSING
      return self._write(bucket, new_name, self.server.buckets[bucket].pop(name)[1], {})
    if found := _UPLOAD.fullmatch(path):
      return self._upload(found[1], query, headers, body)
    if found := _OBJECT.fullmatch(path):
      return self._object(method, *map(urllib.parse.unquote, found.groups()), query, headers)
    if found := _LIST.fullmatch(path):
      return self._list(found[1], query)
    if found := re.fullmatch(r'/storage/v1/b/([^/]+)', path):
      known = found[1] in self.server.buckets
      return _json({'kind': 'storage#bucket', 'name': found[1]}) if known else _MISSING
    return _json({'error': {'code': 501, 'message': f'{method} {target}'}}, 501)

  def _object(self, method, bucket, name, query, headers):
    objects = self.server.buckets.get(bucket, {})
    generation, content = objects.get(name, (0, b''))
    if status := _unmet(query, generation):
      return status, {}, b''
    if name not in objects:
      return _MISSING
    if method == 'DELETE':
      del objects[name]
      return 204, {}, b''
    if query.get('alt') != 'media':
      return _json(_described(bucket, name, generation, content))
    said = {'x-goog-generation': str(generation), 'Content-Type': 'application/octet-stream'}
    asked = re.fullmatch(r'bytes=(\d*)-(\d*)', headers.get('Range', ''))
    if not asked:
      return 200, said, content
    first = int(asked[1]) if asked[1] else max(0, len(content) - int(asked[2]))
    last = min(int(asked[2]) if asked[1] and asked[2] else len(content), len(content) - 1)
    if first >= len(content):
      return 416, said, b''
    said['Content-Range'] = f'bytes {first}-{last}/{len(content)}'
    return 206, said, content[first : last + 1]

  def _list(self, bucket, query):
    if bucket not in self.server.buckets:
      return _MISSING
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter')
    items, prefixes = [], set()
    for name, (generation, content) in sorted(self.server.buckets[bucket].items()):
      if not name.startswith(prefix) or not query.get('startOffset', '') <= name:
        continue
      if 'endOffset' in query and name >= query['endOffset']:
        continue
      rest = name[len(prefix) :]
      if delimiter and delimiter in rest:
        prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
      else:
        items.append(_described(bucket, name, generation, content))
    return _json({'items': items, 'prefixes': sorted(prefixes)})

  def _upload(self, bucket, query, headers, body):
    kind, name = query.get('uploadType'), query.get('name')
    if 'upload_id' in query:
      return self._resumed(query['upload_id'], headers, body)
    if kind == 'multipart':
      boundary = b'--' + re.search('boundary="?([^";]+)', headers['Content-Type'])[1].encode()
      _, described, rest = body.split(boundary, 2)
      name = json.loads(described[described.index(b'{') :])['name']
      body = re.split(rb'\r?\n\r?\n', rest[: rest.rindex(boundary)], maxsplit=1)[1]
      body = body.removesuffix(b'\n').removesuffix(b'\r')
    if kind == 'resumable':
      name = name or json.loads(body)['name']
      upload = str(next(self.server.generations))
      self.server.uploads[upload] = bucket, name, query, bytearray()
      place = f'{self.server.url}/upload/storage/v1/b/{bucket}/o?upload_id={upload}'
      return 200, {'Location': place}, b''
    return self._write(bucket, name, body, query)

  def _resumed(self, upload, headers, body):
    bucket, name, query, so_far = self.server.uploads[upload]
    so_far += body
    _, end, size = re.fullmatch(
      r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)', headers['Content-Range']
    ).groups()
    if size == '*' or (end and int(end) + 1 < int(size)):
      return 308, {'Range': f'bytes=0-{len(so_far) - 1}'}, b''
    return self._write(bucket, name, bytes(so_far), query)

  def _write(self, bucket, name, content, query):
    if bucket not in self.server.buckets:
      return _MISSING
    objects = self.server.buckets[bucket]
    if status := _unmet(query, objects.get(name, (0, b''))[0]):
      return status, {}, b''
    objects[name] = next(self.server.generations), content
    return _json(_described(bucket, name, *objects[name]))

  def _batch(self, headers, body):
    boundary = email.message_from_string(f'Content-Type: {headers["Content-Type"]}').get_boundary()
    parts = []
    for method, target in re.findall(rb'(DELETE|GET|PATCH) (\S+) HTTP', body):
      status, _, _ = self._do(method.decode(), target.decode(), {}, b'')
      parts.append(
        f'--{boundary}\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status} -\r\n\r\n\r\n'
      )
    content = ''.join(parts) + f'--{boundary}--\r\n'
    return 200, {'Content-Type': f'multipart/mixed; boundary={boundary}'}, content.encode()


def _json(value, status=200):
  return status, {'Content-Type': 'application/json'}, json.dumps(value).encode()


_MISSING = _json({'error': {'code': 404, 'message': 'Not Found'}}, 404)


def _unmet(query, generation):
  """The status if a precondition is not met. The generation of what is not there is 0."""
  if 'ifGenerationMatch' in query and int(query['ifGenerationMatch']) != generation:
    return 412
  if 'ifGenerationNotMatch' in query and int(query['ifGenerationNotMatch']) == generation:
    return 304
  return None


def _described(bucket, name, generation, content):
  place = f'b/{bucket}/o/{urllib.parse.quote(name, safe="")}'
  time = '2026-01-01T00:00:00.000Z'
  return {
    'kind': 'storage#object', 'bucket': bucket, 'name': name, 'size': str(len(content)),
    'generation': str(generation), 'metageneration': '1', 'etag': f'e{generation}',
    'timeCreated': time, 'updated': time, 'storageClass': 'STANDARD',
    'contentType': 'application/octet-stream', 'selfLink': f'/storage/v1/{place}',
    'mediaLink': f'/download/storage/v1/{place}?generation={generation}&alt=media',
  }  # fmt: skip
