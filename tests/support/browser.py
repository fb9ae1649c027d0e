"""A page in a headless Chromium, without a driver: its content and its console."""

import dataclasses
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ('chromium', 'chromium-browser', 'google-chrome')
_QUIET = (
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
  '--hide-scrollbars',
  '--host-resolver-rules=MAP * ~NOTFOUND',  # The browser itself would ask its maker for updates.
  '--enable-logging=stderr',
  '--v=0',
  '--virtual-time-budget=60000',
)
_OWN = re.compile(r'https?://([\w-]+\.)*(google|googleapis|gstatic)\.com/')


@dataclasses.dataclass(frozen=True)
class Opened:
  """The result of opening a page in the browser.

  Attributes:
    content: its HTML at the end.
    console: the lines of its console, errors and refused requests among them.
    requests: the addresses that were asked for, besides the page's own file.
  """

  content: str
  console: list[str]
  requests: list[str]


def find() -> str | None:
  """Returns the browser of this machine, None if there is none."""
  return next(filter(None, map(shutil.which, NAMES)), None)


def open_page(page: Path) -> Opened:
  """Opens a file and waits until its scripts have nothing left to do."""
  with tempfile.TemporaryDirectory() as folder:
    log = Path(folder, 'requests.json')
    done = _run(page, folder, '--dump-dom', f'--log-net-log={log}')
    events = json.loads(log.read_text())['events']
  asked = {
    event['params']['url']
    for event in events
    if isinstance(event.get('params'), dict) and 'url' in event['params']
  }
  console = [
    line.partition(':CONSOLE')[2] for line in done.stderr.splitlines() if ':CONSOLE' in line
  ]
  requests = sorted(url for url in asked if not _OWN.match(url) and url != page.as_uri())
  return Opened(done.stdout, console, requests)


def _run(page: Path, folder: str, *flags: str) -> subprocess.CompletedProcess[str]:
  command = [find(), *_QUIET, f'--user-data-dir={folder}/user', *flags, page.as_uri()]
  return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
