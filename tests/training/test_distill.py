"""Runs that learn from a teacher: what they compute, keep, and refuse."""

import shutil

import pytest
import tiny_run
from outcomes import assert_same, losses
from tiny_run import broken, prepared, train_on_one_device
from written_runs import save_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import checkpoint, metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow  # because two runs are trained first
SMALLER = {'model__layer__ffn__tokens': 32, 'train__steps': 10}


@pytest.fixture(scope='module')
def teacher(source, tmp_path_factory):
  """The work directory of a run of 20 steps with checkpoints of steps 15 and 20."""
  root = tmp_path_factory.mktemp('teacher')
  train_on_one_device(tiny_run.config(source, root / 'cache'), root / 'run')
  return root / 'run'


@pytest.fixture(scope='module')
def student(source, teacher, tmp_path_factory):
  """The work directory of a run of 10 steps that learned from step 15 of that teacher."""
  root = tmp_path_factory.mktemp('student')
  config = tiny_run.config(source, root / 'cache', distill__teacher=f'{teacher}@15', **SMALLER)
  train_on_one_device(config, root / 'run')
  return root / 'run'


def meta_of(workdir):
  meta = checkpoint.open_source(workdir).meta
  return meta


def sentence(config, workdir):
  with pytest.raises(UserError) as error:
    prepared(config, workdir)
  return str(error.value)


def test_a_checkpoint_only_names_the_teacher(teacher, student):
  lines = metrics.read(student)
  own = next(line['eval/loss'] for line in metrics.read(teacher) if 'eval/loss' in line)
  figures = next(line for line in lines if 'train/teacher_loss' in line)
  assert figures['train/teacher_loss'] == pytest.approx(own, abs=0.3), 'the teacher is not read'
  assert figures['train/distill_loss'] > 0
  meta, plain = meta_of(student), meta_of(teacher)
  assert meta.checksums.keys() == plain.checksums.keys(), 'the teacher is in the checkpoint'
  assert meta.teacher.source == meta.config.distill.teacher == f'{teacher}@15'


def test_the_weight_0_is_training_without_a_teacher(make, tmp_path, one_device, teacher):
  changes = {**SMALLER, 'train__steps': 5}
  plain = loop.train(make(**changes), tmp_path / 'plain')
  config = make(distill__teacher=str(teacher), distill__weight=0.0, **changes)
  assert_same(loop.train(config, tmp_path / 'run'), plain, 'weight 0')
  assert losses(tmp_path / 'run') == losses(tmp_path / 'plain')


def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(
  make, tmp_path, one_device, teacher, student
):
  """With the checkpoint that it had, though the teacher has a later one."""
  again = broken(student, tmp_path / 'run', 5)
  loop.train(make(distill__teacher=str(teacher), **SMALLER), again)
  assert meta_of(again).checksums == meta_of(student).checksums


@pytest.mark.parametrize(
  ('changes', 'named'),
  [
    ({'distill__teacher': '{}@7'}, 'has no checkpoint of step 7'),
    ({'distill__teacher': '{}/none'}, 'none is not the work directory of a run'),
    (
      {'data__tokenizer': 'bpe:300'},
      "is 'bpe:300', but config.distill.teacher={} was trained with",
    ),
    (
      {'model__vocab_size': 512},
      'config.model.vocab_size is 512, and config.distill.teacher={}@20',
    ),
  ],
  ids=['step', 'run', 'tokenizer', 'vocabulary'],
)
def test_a_teacher_that_does_not_fit_is_one_sentence(
  make, tmp_path, one_device, teacher, changes, named
):
  changes = {'distill__teacher': '{}', **changes}
  changes['distill__teacher'] = changes['distill__teacher'].format(teacher)
  said = sentence(make(**changes), tmp_path / 'run')
  assert named.format(teacher) in said, said
  assert not (tmp_path / 'run').exists(), 'the mistake left a work directory'


def test_a_teacher_that_the_mesh_cannot_split_is_one_sentence(make, tmp_path, teacher):
  options = {'mesh__fsdp': 1, 'mesh__tokens': 8, 'model__layer__mixer__heads': 8}
  positions = {'model__layer__mixer__positions__kind': 'none'}
  config = make(distill__teacher=str(teacher), **options, **positions)
  said = sentence(config, tmp_path / 'run')
  assert f"{teacher}@20 cannot be split over the mesh: the axis 'heads'" in said


def test_a_run_keeps_its_teacher(make, tmp_path, one_device, teacher, student):
  shutil.copytree(student, tmp_path / 'run')
  kept, moved = f'{teacher}@15', tmp_path / 'moved'
  other = sentence(make(distill__teacher=f'{teacher}@20', **SMALLER), tmp_path / 'run')
  assert f'has other parameters than {kept}' in other
  assert f'was trained with the teacher {kept}' in sentence(make(**SMALLER), tmp_path / 'run')
  missing = sentence(make(distill__teacher=str(moved), **SMALLER), tmp_path / 'run')
  assert 'is not the work directory of a run' in missing and 'put it back' in missing
  shutil.copytree(teacher, moved)
  run = prepared(make(distill__teacher=f'{moved}@15', **SMALLER), tmp_path / 'run')
  assert run.teacher.record.source == f'{moved}@15', 'a teacher cannot be moved'


def test_a_student_has_the_trained_tokenizer_of_its_teacher(tmp_path, one_device):
  """`bpe:SIZE` on other text would be another tokenizer."""
  texts = tiny_run.write_two_corpora(tmp_path / 'texts')

  def config(text, **changes):
    source = f'files:{texts}/{text}/*.txt'
    return tiny_run.config(source, tmp_path / 'cache', data__tokenizer='bpe:280', **changes)

  kept = save_run(config('old'), tmp_path / 'teacher', 1).tokenizer
  student = config('new', distill__teacher=str(tmp_path / 'teacher'))
  assert prepared(student, tmp_path / 'run').task.vocabulary() == kept
