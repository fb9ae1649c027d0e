"""A stand-in for the hub: what the libraries `huggingface_hub` and `datasets` ask of it, in memory.

It answers for models and for sets of data: their files at a revision, the content of each file with
its ETag, its commit and ranges, and the errors by which the hub says what is missing or gated.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import urllib.parse
from pathlib import Path

import local_server
import pytest

_API = re.compile(
  r'/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/(.+))?'
)
_FILE = re.compile(r'/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)')


@dataclasses.dataclass
class Repository:
  """The files of a model or a set by their names, at the revision `main` and at its commit.

  `gated` needs the token `let-me-in`. `cuts` counts, by the name of a file, how often its transfer
  still ends after half of what is asked for.
  """

  files: dict[str, bytes]
  gated: bool = False
  cuts: dict[str, int] = dataclasses.field(default_factory=dict)

  @property
  def commit(self) -> str:
    return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

  @classmethod
  def of(cls, folder: Path, **how) -> 'Repository':
    """The files of a folder."""
    paths = [path for path in folder.rglob('*') if path.is_file()]
    return cls({str(path.relative_to(folder)): path.read_bytes() for path in paths}, **how)


class Server(local_server.Server):
  """Repositories by their names; those of data begin with `datasets/`."""

  def __init__(self):
    super().__init__(_Handler)
    self.repositories: dict[str, Repository] = {}

  def fetched(self) -> list[str]:
    """The names of the files whose content was asked for, in the order of the calls."""
    found = (re.fullmatch(r'GET \S+/resolve/[^/]+/(\S+).*', call) for call in self.asked)
    return [match[1] for match in found if match]


def serving() -> contextlib.AbstractContextManager[Server]:
  """Run a server without repositories."""
  return local_server.serving(Server())


def use(patch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
  """Has `huggingface_hub` in this process take a server for the hub, with an empty cache."""
  from huggingface_hub import constants  # noqa: PLC0415 (slow)

  patch.setattr(constants, 'ENDPOINT', url)
  template = f'{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
  patch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
  patch.setattr(constants, 'HF_HUB_CACHE', str(cache / 'hub'))
  patch.setattr(constants, 'HF_TOKEN_PATH', str(cache / 'token'))
  patch.setattr(constants, 'HF_HUB_OFFLINE', False)
  patch.delenv('HF_TOKEN', raising=False)
  patch.setenv('no_proxy', '127.0.0.1')


class _Handler(local_server.Handler):
  server: Server

  def answer(self, body: bytes) -> None:
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
    if found := _API.fullmatch(path):
      kind, name, action, revision, folder = found.groups()
      repository = self._repository(kind == 'datasets', name, revision)
      if repository:
        asked = _asked(body) if action == 'paths-info' else None
        recursive = 'recursive=true' in self.path.lower()
        is_tree = action in ('tree', 'paths-info')
        tree = _tree(repository, folder, recursive=recursive or bool(asked))
        picked = [entry for entry in tree if asked is None or entry['path'] in asked]
        self.send(200, picked if is_tree else _described(repository, name))
    elif found := _FILE.fullmatch(path):
      is_data, name, revision, file = found.groups()
      repository = self._repository(bool(is_data), name, revision)
      if repository:
        self._send_file(repository, file)
    else:
      self.send(404, {'error': 'no such page'})

  def _repository(self, is_data: bool, name: str, revision: str | None) -> Repository | None:
    """The repository; None: the error is sent."""
    found = self.server.repositories.get(f'datasets/{name}' if is_data else name)
    if found is None:
      self.send(401, {'error': 'Repository not found'}, {'X-Error-Code': 'RepoNotFound'})
    elif revision not in (None, 'main', found.commit):
      self.send(404, {'error': 'Invalid rev'}, {'X-Error-Code': 'RevisionNotFound'})
      return None
    return found

  def _send_file(self, repository: Repository, name: str) -> None:
    content = repository.files.get(name)
    said = {'X-Repo-Commit': repository.commit}
    if content is None:
      self.send(404, {'error': 'Entry not found'}, said | {'X-Error-Code': 'EntryNotFound'})
      return
    if repository.gated and self.headers.get('Authorization') != 'Bearer let-me-in':
      self.send(403, {'error': 'gated'}, said | {'X-Error-Code': 'GatedRepo'})
      return
    said |= {'ETag': f'"{hashlib.sha1(content).hexdigest()}"', 'Accept-Ranges': 'bytes'}
    status, part = 200, content
    if asked := re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', '')):
      status, last = 206, int(asked[2] or len(content) - 1)
      part = content[int(asked[1]) : last + 1]
      said['Content-Range'] = f'bytes {asked[1]}-{last}/{len(content)}'
    if self.command == 'GET' and repository.cuts.get(name):
      repository.cuts[name] -= 1
      self.send(status, part, said, sent=len(part) // 2)
    else:
      self.send(status, part, said)


def _asked(body: bytes) -> list[str]:
  """The paths that a call asks about."""
  form = urllib.parse.parse_qs(body.decode())
  return form['paths'] if form else json.loads(body)['paths']


def _tree(repository: Repository, folder: str | None, *, recursive: bool) -> list[dict]:
  """The files in a folder; with `recursive` those in its folders as well, else these folders."""
  prefix, entries = f'{folder}/' if folder else '', {}
  for path, data in repository.files.items():
    rest = path.removeprefix(prefix)
    if path.startswith(prefix) and (recursive or '/' not in rest):
      oid = hashlib.sha1(data).hexdigest()
      entries[path] = {'type': 'file', 'path': path, 'size': len(data), 'oid': oid}
    elif path.startswith(prefix):
      inner = prefix + rest.partition('/')[0]
      entries[inner] = {'type': 'directory', 'path': inner, 'size': 0, 'oid': repository.commit}
  return [*entries.values()]


def _described(repository: Repository, name: str) -> dict:
  """Return the API's description of a repository."""
  siblings = [{'rfilename': file} for file in repository.files]
  return {'id': name, 'sha': repository.commit, 'private': False, 'siblings': siblings}
