"""The pages with commands, run from top to bottom as a reader would, but for fewer steps.

Every block of a page runs, one after the other, in one directory that stands for a checkout. A
command is never left out. What differs from the page is in this file alone:

- `PRELUDE`: bash functions in the place of `pip` and `pytest`, which .ci/run runs; and `TINY`,
  flags for `train` that the page's own flags override, for runs that do not exist yet.
- `PREPARED`: runs that are like another one; they are prepared, and make no step.
- `SMALLER`: text of the page, and what runs in its place. A text that the page does not have fails.
- `_bring`: the files that a reader has from elsewhere.
"""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import commands_server
import hub_server
import numpy as np
import published
import pytest
import released
import tiny_run
from tiny import tiny_model

from tokenformer_jax.convert import released_torch

TINY = (
  '--config.train.steps=4 --config.train.eval_every=0 --config.train.eval_batches=2 '
  '--config.optim.warmup_steps=1 --config.data.batch_size=2'
)
TINY_TEXT = '--config.train.sample_tokens=0 --config.model.width=48'  # also, of text alone

# Texts of the commands that train them: tracing a step is the cost of a command.
PREPARED = (
  'train --workdir=runs/grown',
  'train --workdir=runs/tuned',
  'train --workdir=runs/branch',
  'train --config=local.py',
  'train --workdir=runs/local_flags',
  'train --config=lm_switch',
  'train --config=lm_sparse_tokenformer',
  'train --workdir=runs/mixture',
  'train --workdir=runs/wider',
  'train --workdir=runs/prose',
  'train --config=configs/vit_digits.py',
  'train --config=configs/vit_imagenet.py:b16',
  'train --workdir=runs/qwen_preferred',
  'train --workdir=runs/lora',
)
PREPARE = """
from tokenformer_jax.cli import train
from tokenformer_jax.parallel import sharding
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop, prepare


def prepare_run(config, workdir):
  prepare.prepare(config, paths.parse_path(workdir), sharding.find_devices())
  return None, False


loop.train_or_stop = prepare_run
train.run()
"""

# Of the harness's thousands of tasks, whose files it would read for ten seconds, the pages use none
# here: see `SMALLER`.
OWN_TASKS = """
import functools
import runpy

from tokenformer_jax.decoding import harness

harness.TaskManager = functools.partial(harness.TaskManager, include_defaults=False)
runpy.run_module('tokenformer_jax', run_name='__main__', alter_sys=True)
"""

PRELUDE = f"""
set -euo pipefail
PYTHON=({sys.executable} -S {commands_server.__file__} "$SERVER")
exists() {{  # whether the run of a command exists, by its --workdir
  for word in "$@"; do
    if [[ $word == --workdir=* && -e ${{word#--workdir=}}/config.json ]]; then return 0; fi
  done
  return 1
}}
train() {{
  local config=() tiny=({TINY}) rest=()
  if exists "$@"; then "${{TRAIN[@]}}" "$@"; return; fi
  for word in "$@"; do
    if [[ $word == --config=* ]]; then config+=("$word"); else rest+=("$word"); fi
  done
  if [[ "$*" != *vit_* ]]; then tiny+=({TINY_TEXT}); fi
  "${{TRAIN[@]}}" "${{config[@]}}" "${{tiny[@]}}" "${{rest[@]}}"
}}
tokenformer() {{
  if [ "$1" = train ]; then
    TRAIN=("${{PYTHON[@]}}" -m tokenformer_jax train)
    train "${{@:2}}"
  elif [ "$1" = prepare ]; then
    TRAIN=("${{PYTHON[@]}}" prepare.py)
    train "${{@:2}}"
  elif [ "$1" = evaluate ]; then
    "${{PYTHON[@]}}" own_tasks.py "$@"
  else
    "${{PYTHON[@]}}" -m tokenformer_jax "$@"
  fi
}}
python() {{
  if [ "$1" != train.py ]; then "${{PYTHON[@]}}" "$@"; return; fi
  TRAIN=("${{PYTHON[@]}}" train.py)
  train "${{@:2}}"
}}
pip() {{  # All is installed; `test_the_pages_install_known_extras` checks the words.
  echo "pip $*"
}}
pytest() {{
  echo "pytest $*"
}}
"""

# In the order of their needs: a page may read the runs of those before it.
PAGES = (
  'README.md',
  'docs/run.md',
  'docs/layers.md',
  'docs/growth.md',
  'docs/look.md',
  'docs/commands.md',
  'docs/downloaded.md',
)
MODEL = 'Qwen/Qwen3-0.6B'  # of a page: a tiny one of a stand-in for the hub

SMALLER = [
  ('--layers=32', '--layers=3'),
  ('--ffn_width=4096', '--ffn_width=32'),
  ('.sequence_length=1024', '.sequence_length=64'),
  ('BUCKET=my-bucket launch/', 'BUCKET=my-bucket DRY_RUN=1 launch/'),
  ('--config.train.steps=6500', '--config.train.steps=6'),
  ('.train(3000)', '.train(6)'),
  ('--config.train.steps=200', '--config.train.steps=4 --config.optim.warmup_steps=1'),
  ('--topology=v5p:4x4x4', '--topology=v5p:2x2x1 --config.data.batch_size=64 --quick'),
  ('--config.train.steps=1500', '--config.train.steps=6'),
  ('--config.train.steps=10000', '--config.train.steps=8'),
  ('--config.train.checkpoint_every=800', '--config.train.checkpoint_every=4'),
  ('@800', '@4'),
  ('@375', '@4'),
  ('--config.train.decay_from=800', '--config.train.decay_from=4'),
  ('--config.train.steps=1000', '--config.train.steps=6'),
  # Trackers that are installed everywhere.
  ('--config.train.trackers=tensorboard,wandb', '--config.train.trackers=tensorboard'),
  ('--config.train.trackers=wandb', '--config.train.trackers=tensorboard'),
  # As many kinds of layers in fewer programs.
  (
    '--config=configs/lm_hybrid.py:hwfa2',
    "--config=configs/lm_hybrid.py:hwfa2 --config.model.pattern='local full'",
  ),
  (
    'train --config=transformer_stdlib',
    'train --config=transformer_stdlib --config.model.layer.ffn.width=64',
  ),
  # A model of `defaults()`, which is larger than the other configs'.
  (
    '--config=local.py',
    '--config=local.py --config.model.width=64 --config.data.tokenizer=bytes '
    '--config.data.batch_size=4',
  ),
  # Tasks that need no internet.
  (
    '--tasks=lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande',
    '--include_path=tests/tasks --tasks=local_choices --limit=2',
  ),
  ("--text='files:docs/*.md'", '--text=files:docs/release.md'),
  ('--out=heat.png', '--out=heat.png --corpus_tokens=512'),
  ('--corpus_tokens=4096', '--corpus_tokens=512'),
  # A model for TPUs, and images of which there are 1.3 million.
  (
    '--config=configs/vit_imagenet.py:b16',
    '--config=configs/vit_imagenet.py:b16 --config.data.source=digits '
    '--config.data.image_size=8 --config.model.patch=4 --config.model.width=96 '
    "--config.model.pattern='layer*2' --config.data.batch_size=4 --config.train.epochs=0 "
    '--config.optim.warmup_epochs=0 --config.data.workers=0',
  ),
]


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of a page; its text as on the page, without the indentation of a list."""

  page: str
  line: int
  language: str
  text: str

  def __str__(self):
    return f'{self.page}:{self.line}'


def read_blocks(page: str) -> Iterator[Block]:
  language, start, lines = None, 0, []
  for number, line in enumerate((tiny_run.ROOT / page).read_text().splitlines(), 1):
    fence = re.fullmatch(r' *```(\w*)', line)
    if not fence:
      lines.append(line)
    elif language is None:
      language, start, lines = fence[1], number, []
    else:
      yield Block(page, start, language, textwrap.dedent('\n'.join(lines)) + '\n')
      language = None
  assert language is None, f'{page}:{start}: the block has no end'


BLOCKS = {page: list(read_blocks(page)) for page in PAGES}


def test_the_language_of_every_block_is_known():
  """A block of another language, or of none, would not run."""
  for block in (block for page in BLOCKS.values() for block in page):
    assert block.language in ('sh', 'python', ''), f'{block}: {block.language}'
    commands = re.findall(r'^(?:tokenformer|python|pip|import) .*', block.text, re.MULTILINE)
    assert block.language or not commands, f'{block} has no language, and commands: {commands}'
  assert all(BLOCKS.values())


def test_the_pages_install_known_extras():
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  extras = {*project['optional-dependencies']}
  known = {'install -e .'}
  if 'Repository' in project['urls']:  # from the first release on; see .ci/release.py
    known.add('install tokenformer_jax')
  for block in (block for page in BLOCKS.values() for block in page):
    for asked in re.findall(r'^pip (.*?)(?: +#.*| &&.*)?$', block.text, re.MULTILINE):
      brought = re.fullmatch(r'install -e "\.\[([\w,]+)\]"', asked)
      found = {*brought[1].split(',')} <= extras if brought else asked in known
      assert found, f'{block}: pip {asked}'


def test_the_extras_that_python_needs_are_named_before_it():
  asked = ''
  for block in BLOCKS['README.md']:
    asked += block.text * (block.language == 'sh')
    for method in re.findall(r'\.(plot|report)\(', block.text):
      assert re.search(rf'".*\b{method}\b.*"', asked), f'{block}: no extra for {method}'


def test_git_ignores_what_the_commands_of_the_pages_write():
  text = '\n'.join(block.text for page in BLOCKS.values() for block in page)
  flags = re.findall(r'--(?:workdir|target|out|output|json)=([\w./]+)(?![\w./]*:)', text)
  shell = re.findall(r' > ([\w.]+)', text)
  files = {*flags, *shell, *re.findall(r"(?:savefig|write|to_hf|to_peft)\('([\w./]+)'", text)}
  done = subprocess.run(
    [
      'git',
      'check-ignore',
      '--no-index',
      *sorted(f'{name}/x' if '.' not in name else name for name in files),
    ],
    cwd=tiny_run.ROOT,
    capture_output=True,
    text=True,
  )
  if done.returncode == 128:
    pytest.skip('this is no repository of git')
  ignored = {line.removesuffix('/x') for line in done.stdout.splitlines()}
  assert files - ignored == set()


def make_smaller(page: str) -> list[Block]:
  """The blocks of a page with the texts of `SMALLER` in their place."""
  blocks = BLOCKS[page]
  for text, smaller in [*SMALLER, *((text, text.replace('train', 'prepare')) for text in PREPARED)]:
    blocks = [dataclasses.replace(b, text=b.text.replace(text, smaller)) for b in blocks]
  return blocks


def test_shortened_commands_are_on_the_pages():
  blocks = [block.text for page in BLOCKS.values() for block in page]
  shortened = [*PREPARED, *(text for text, _ in SMALLER)]
  missing = [text for text in shortened if not any(text in block for block in blocks)]
  assert not missing


def make_checkout(directory: Path) -> None:
  """Link what a checkout has into a directory, and put beside it what a reader brings."""
  for path in tiny_run.ROOT.iterdir():
    if path.name != 'runs' and not path.name.startswith('.'):
      (directory / path.name).symlink_to(path)
  (directory / 'prepare.py').write_text(PREPARE)
  (directory / 'own_tasks.py').write_text(OWN_TASKS)
  _bring(directory)


def _bring(directory: Path) -> None:
  """Write released weights as wide as the 150m model, whose width tells the heads."""
  model = tiny_model(width=768, heads=12, vocab_size=64)
  rng = np.random.default_rng(0)
  shapes = released_torch.layout(model).items()
  weights = {name: rng.normal(size=place.shape).astype(np.float32) for name, place in shapes}
  released.write(directory / 'pytorch_model.bin', weights)
  released.write_tokenizer(directory)


def run_block(block: Block, directory: Path, server: commands_server.Server) -> None:
  """Run a block to its end in a directory."""
  started = time.monotonic()
  if block.language == 'sh':
    command = ['bash', '-c', PRELUDE + block.text]
    environment = {**tiny_run.environment(), 'SERVER': server.socket}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
  else:
    named = re.match(r'# (\w+\.py)\n', block.text)
    file = directory / (named[1] if named else 'block.py')
    file.write_text(block.text)
    done = server.run([file.name], directory)
  print(f'{block}: {time.monotonic() - started:.0f} s')
  assert done.returncode == 0, f'{block}:\n{block.text}{done.stdout[-500:]}\n{done.stderr[-3000:]}'


@pytest.fixture
def hub_commands(tmp_path_factory):
  """A process that runs commands, for which the hub is a stand-in with one model."""
  folder = published.write(tmp_path_factory.mktemp('hub') / 'qwen', 'qwen3')
  with hub_server.serving() as hub:
    hub.repositories[MODEL] = hub_server.Repository.of(folder)
    own = {'HF_ENDPOINT': hub.url, 'HF_HOME': str(folder / 'cache'), 'no_proxy': '127.0.0.1'}
    made = commands_server.Server(tiny_run.environment() | own)
    yield made
    made.close()


@pytest.mark.slow
def test_the_pages_run_from_top_to_bottom(tmp_path, hub_commands):
  pytest.importorskip('libtpu', reason='pip install -e ".[tpu]" brings the planner\'s compiler')
  pytest.importorskip('transformers')
  make_checkout(tmp_path)
  for page in PAGES:
    for block in make_smaller(page):
      if block.language:
        run_block(block, tmp_path, hub_commands)
  missing = [name for name in _named_runs() if not (tmp_path / name).is_dir()]
  assert not missing, f'these runs are named in a block, and none makes them: {missing}'
  assert os.path.getsize(tmp_path / 'texts.jsonl'), 'no texts were written'


def _named_runs() -> set[str]:
  blocks = [block.text for page in PAGES for block in make_smaller(page) if block.language]
  blocks = [text for text in blocks if '--dry_run' not in text]  # which makes nothing
  return set(re.findall(r'(?<!prepare --workdir=)(?<!-bucket/)runs/\w+', '\n'.join(blocks)))
