"""The tree has every stage once, with what it cost, also of runs that are not on the page."""

import dataclasses

import pytest
import written_runs
from written_runs import CONFIG

from tokenformer_jax.config import GrowConfig
from tokenformer_jax.report import lineage, record
from tokenformer_jax.runs import batches
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta


def resized(config, tokens):
  ffn = dataclasses.replace(config.model.layer.ffn, tokens=tokens)
  layer = dataclasses.replace(config.model.layer, ffn=ffn)
  return dataclasses.replace(config, model=dataclasses.replace(config.model, layer=layer))


SIZES = [resized(CONFIG, tokens) for tokens in (512, 1024, 2048)]


@pytest.fixture
def family(tmp_path):
  """Runs small, medium and large, each grown from the one before after 100 steps more."""
  runs, entries = [], []
  for i, (name, config) in enumerate(zip(('small', 'medium', 'large'), SIZES, strict=True)):
    lines = [line for line in written_runs.falling(100 * (i + 1)) if line['step'] > 100 * i]
    path = written_runs.write(tmp_path / name, lines, config)
    times = [{**line, 'step': 100 * i + line['step']} for line in written_runs.hourly(100)]
    written_runs.add(path / 'times.jsonl', times)
    step = 100 * (i + 1)
    meta = Meta(step, config, {'kind': 'bytes'}, tuple(entries))
    runs.append(dataclasses.replace(record.read(path, name), meta=meta))
    history = batches.continued((), 0, config.data)
    spent = batches.all_flops(tuple(entries), config, history, step)
    entry = Ancestor('grow', str(path), step, config.model, GrowConfig(), step, flops=spent)
    entries.append(dataclasses.replace(entry, tokens=4096.0 * step))
  return runs


def test_each_stage_has_its_size_loss_and_cost(family):
  stages = lineage.stages(family)
  small, medium, large = stages.values()
  assert [stage.birth.action for stage in stages.values()] == ['scratch', 'grow', 'grow']
  assert medium.birth.parent == small.directory and large.birth.parent == medium.directory
  assert medium.birth.flops == small.flops and large.birth.flops == medium.flops
  assert large.flops == pytest.approx(family[2].at('flops', 300))
  assert (large.birth.tokens, large.tokens) == (4096 * 200, 4096 * 300)
  assert large.loss == pytest.approx(3.1 + 9 / 300)
  assert large.seconds == 600 + 120 + 10 * 3600
  assert lineage.parents(stages) == {1: 0, 2: 1}
  assert '<td>grow</td><td>medium</td><td>ffn tokens 1,024 → 2,048' in lineage.table(stages)


def test_a_run_alone_shows_what_it_grew_from(family):
  alone = lineage.stages(family[2:])
  whole = lineage.stages(family)
  for stage, known in zip(alone.values(), whole.values(), strict=True):
    assert (stage.name, stage.flops, stage.loss) == (known.name, known.flops, known.loss)
    assert (stage.run is None) == (stage.name != 'large')


def test_an_ancestor_that_is_not_here_has_no_loss(family, tmp_path):
  (tmp_path / 'small').rename(tmp_path / 'moved')
  small = next(iter(lineage.stages(family[1:]).values()))
  assert small.loss is None and small.seconds is None and small.flops > 0


@pytest.mark.parametrize(('decay_from', 'action'), [(100, 'decay'), (0, 'continue')])
def test_a_branch_begins_from_its_run(family, tmp_path, decay_from, action):
  train = dataclasses.replace(CONFIG.train, decay_from=decay_from)
  config = dataclasses.replace(SIZES[0], train=train, init_from=f'{tmp_path}/small@100')
  path = written_runs.write(tmp_path / 'branch', [{'step': 120, 'eval/loss': 2.9}], config)
  written_runs.add(path / 'times.jsonl', [{'step': 100, 'devices': '1 × cpu', 'time': 1e9}])
  stages = lineage.stages([family[0], record.read(path, 'branch')])
  small, branch = stages.values()
  assert (branch.birth.parent, branch.birth.action) == (small.directory, action)
  assert branch.birth.flops == pytest.approx(small.flops)


def test_runs_without_growth_have_no_table(family):
  assert not lineage.table(lineage.stages(family[:1]))
