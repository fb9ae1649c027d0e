"""The page has the sections that its runs have, escapes what they say, and stays small."""

import base64
import gzip
import json
import re
import sys

import plotly.graph_objects as go
import pytest
import written_runs

from tokenformer_jax.errors import UserError
from tokenformer_jax.report import page


def data_of(content):
  packed = re.search(r'id="data">([^<]*)<', content)[1]
  return json.loads(gzip.decompress(base64.b64decode(packed)))


def sections(content):
  return re.findall(r'<section id="([\w-]+)">', content)


def test_missing_records_of_a_run_are_absent_from_the_page(tmp_path):
  bare = written_runs.write(tmp_path / 'bare', [{'step': 5, 'train/loss': 3.0}], None)
  assert sections(page.build([bare]).html) == ['overview', 'curves', 'notes']
  run = written_runs.write(tmp_path / 'run', written_runs.falling(100))
  written_runs.add(run / 'times.jsonl', written_runs.hourly(100))
  written_runs.add(run / 'samples.jsonl', [{'step': 50, 'name': 'sample', 'text': 'def f():'}])
  content = page.build([run, bare]).html
  assert sections(content) == ['overview', 'curves', 'speed', 'times', 'samples', 'notes']
  for figure in data_of(content)['figures'].values():
    go.Figure(figure)  # It refuses what plotly does not know.


def test_a_run_is_shown_once_and_configs_are_compared(tmp_path):
  runs = [written_runs.write(tmp_path / name, written_runs.falling(50)) for name in 'ab']
  (tmp_path / 'linked').symlink_to(runs[0])
  content = page.build([*runs, runs[0], tmp_path / 'linked']).html
  assert f'{tmp_path}/linked is given more than once' in content
  assert [run['name'] for run in data_of(content)['runs']] == ['a', 'b']
  assert 'The configs are equal.' in content


def test_texts_of_runs_are_no_part_of_the_page(tmp_path):
  bad = '</script><script>alert(1)</script><img src=x>'
  run = written_runs.write(tmp_path / 'a<b>', written_runs.falling(50))
  written_runs.add(run / 'samples.jsonl', [{'step': 50, 'name': bad, 'text': bad}])
  written_runs.add(run / 'metrics.jsonl', [{'step': 50, f'train/{bad}': 1.0}])
  content = page.build([run]).html
  assert 'alert(1)' not in content and 'a<b>' not in content and 'a&lt;b&gt;' in content
  assert data_of(content)['samples'][0]['texts'][0]['text'] == bad


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(50))
  built = page.build([run])
  shown = built._repr_html_()
  assert shown.startswith('<iframe srcdoc="') and shown.count('"') == 4
  built.write(tmp_path / 'page.html')
  assert (tmp_path / 'page.html').read_text('utf-8') == built.html
  assert re.fullmatch(r'<Page of \d\.\d MB; write\(path\) saves it>', repr(built))


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'plotly', None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[report\]"'):
    page.build([tmp_path])
