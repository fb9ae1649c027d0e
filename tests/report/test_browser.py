"""Pages in a real browser: no error, nothing asked of another place, every chart with its axes."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest
import tiny_run
import written_runs

import tokenformer_jax
from tokenformer_jax.parallel import sharding
from tokenformer_jax.report import page
from tokenformer_jax.training import loop

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')
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
class _Opened:
  """The result of opening a page in the browser.

  Attributes:
    content: its HTML at the end.
    console: the lines of its console, errors and refused requests among them.
    requests: the addresses that were asked for, besides the page's own file.
  """

  content: str
  console: list[str]
  requests: list[str]


def _find() -> str | None:
  """Returns the browser of this machine, None if there is none."""
  return next(filter(None, map(shutil.which, _NAMES)), None)


def _open_page(page: Path) -> _Opened:
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
  return _Opened(done.stdout, console, requests)


def _run(page: Path, folder: str, *flags: str) -> subprocess.CompletedProcess[str]:
  command = [_find(), *_QUIET, f'--user-data-dir={folder}/user', *flags, page.as_uri()]
  return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(_find() is None, reason='no chromium here: apt-get install chromium'),
]

# Runs after the page has drawn; what it puts into `seen` can be read from the page.
_AFTER = """<script>
(async () => {
  const wait = () => new Promise((resolve) => setTimeout(resolve, 300));
  const set = async (name, value) => {
    const control = document.getElementById(name);
    control[control.type === 'checkbox' ? 'checked' : 'value'] = value;
    control.dispatchEvent(new Event('input'));
    await wait();
  };
  const text = (query) => document.querySelector(query)?.textContent ?? 'NOTHING';
  const seen = [];
  while (!document.body.dataset.drawn && document.getElementById('problem').hidden) await wait();
  %s
  document.body.dataset.seen = seen.join('|');
})();
</script></body>"""


@pytest.fixture(scope='module')
def family(tmp_path_factory):
  """A model, a decay of it, and what it grew to."""
  folder = tmp_path_factory.mktemp('family')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    source = tiny_run.write_corpus(folder / 'text')
    changes = {'model__pattern': 'layer', 'optim__schedule': 'constant', 'train__steps': 10}
    loop.train(tiny_run.config(source, folder / 'cache', **changes), folder / 'small')
    small = tokenformer_jax.load(folder / 'small')
    train = dataclasses.replace(small.config.train, steps=15, decay_from=10)
    config = dataclasses.replace(small.config, train=train, init_from=f'{folder}/small@10')
    decayed = written_runs.write(folder / 'decayed', [{'step': 15, 'eval/loss': 2.9}], config)
    large = small.grow(folder / 'large', {'ffn': 192, 'qkv': 64})
    written_runs.add(large.directory / 'metrics.jsonl', written_runs.falling(100))
    written_runs.add(large.directory / 'times.jsonl', written_runs.hourly(100))
    samples = [{'step': step, 'name': 'sample', 'text': 'def'} for step in (50, 100)]
    written_runs.add(large.directory / 'samples.jsonl', samples)
    yield [small, decayed, large]


def open_page(content, folder, actions=''):
  assert content.count('</body>') == 1
  path = folder / 'page.html'
  path.write_text(content.replace('</body>', _AFTER % actions), 'utf-8')
  opened = _open_page(path)
  assert opened.console == [], 'the page reports errors'
  assert opened.requests == [], 'the page asks other places for something'
  assert 'data-drawn="yes"' in opened.content
  return opened.content


def titles(content):
  """The titles of the axes of each chart by its name."""
  charts = re.split(r'<div class="chart(?: tall)? js-plotly-plot" id="chart-', content)[1:]
  return {
    chart.partition('"')[0]: re.findall(r'class="[xy]\d*title"[^>]*>([^<]+)<', chart)
    for chart in charts
  }


def test_a_family_is_drawn_whole_and_controls_change_it(family, tmp_path):
  content = family[-1].report(beside=family[:-1], models=1).html
  assert len(content.encode()) < 5e6
  actions = """
  for (const axis of ['tokens', 'flops', 'hours', 'steps']) {
    await set('curve-axis', axis);
    seen.push(text('#chart-curves .xtitle'));
  }
  const last = document.querySelector('#curve-figure optgroup:last-child option');
  await set('curve-figure', last.value);
  seen.push(text('#chart-curves .ytitle'));
  await set('curve-figure', 0);
  await set('curve-log-y', true);
  seen.push(document.getElementById('chart-curves').layout.yaxis.type);
  await set('sample-step', 0);
  seen.push(text('#sample-at'));
  """
  opened = open_page(content, tmp_path, actions)
  assert titles(opened) == {
    'curves': ['training step', 'loss (nats per token)'],
    'flops': ['model FLOPs of training', 'validation: loss (nats)'],
    'times': ['hours of wall time', 'run'],
  }
  seen = re.search(r'data-seen="([^"]*)"', opened)[1].split('|')
  assert seen[:4] == [
    'tokens of training',
    'model FLOPs of training',
    'hours of this run’s processes',
    'training step',
  ]
  assert seen[4] not in ('NOTHING', 'loss (nats per token)') and seen[5] == 'log'
  assert int(seen[6]) > 0, 'no sample at the first place'


def test_no_label_is_cut_on_a_phone_and_wide_tables_say_that_they_scroll(family, tmp_path):
  """In a frame as wide as a phone every text of every chart lies inside its chart."""
  actions = """
  for (const chart of document.querySelectorAll('.js-plotly-plot')) {
    const around = chart.getBoundingClientRect();
    for (const label of chart.querySelectorAll('text')) {
      const {left, right, width} = label.getBoundingClientRect();
      if (width && (left < around.left - 1 || right > around.right + 1)) {
        seen.push(`${chart.id}: ${label.textContent}`);
      }
    }
  }
  for (const box of document.querySelectorAll('.scroll')) {
    if (box.scrollWidth > box.clientWidth + 1 && !box.classList.contains('wide')) {
      seen.push(`no hint: ${box.textContent}`);
    }
  }
  seen.push(innerWidth, document.querySelectorAll('.scroll.wide').length > 0);
  parent.document.body.dataset.seen = seen.join('|');
  """
  page_html = family[-1].report(beside=family[:-1], models=0).html
  framed = page_html.replace('</body>', _AFTER % actions)
  frame = f'<iframe style="width: 390px; height: 900px; border: 0" srcdoc="{html.escape(framed)}">'
  path = tmp_path / 'phone.html'
  path.write_text(f'<!doctype html><body>{frame}</iframe></body>', 'utf-8')
  opened = _open_page(path)
  assert opened.console == []
  assert re.search(r'data-seen="([^"]*)"', opened.content)[1] == '390|true'


def test_runs_in_progress_and_without_records_are_drawn(tmp_path):
  bare = written_runs.write(tmp_path / 'bare', [{'step': 5, 'train/loss': 3.0}], None)
  begun = written_runs.write(tmp_path / 'begun', written_runs.falling(30))
  axes = titles(open_page(page.build([bare, begun]).html, tmp_path))
  assert axes == {'curves': ['training step', 'loss (nats per token)']}
