"""Sources of images: what they find, and what they say of what is wrong."""

import errno
import hashlib
import io
import os
import shutil
from pathlib import Path

import image_files
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from tiny_imagenet import tiny_imagenet

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data import images
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import retry


def _open(source: str, **changes) -> images.ImageSet:
  images.open_images.cache_clear()
  return images.open_images(ImagesConfig(source=source, **changes))


def test_the_digits_are_scikit_learns_and_every_class_is_held_out():
  image_set = _open('digits')
  assert (len(image_set.train), len(image_set.validation)) == (1438, 359)
  assert (len(image_set.classes), image_set.channels) == (10, 1)
  held_out = [image_set.validation.read(i)[1] for i in range(359)]
  assert np.bincount(held_out).min() > 25, 'a class is nearly missing in the validation split'
  whole = hashlib.sha256()
  for split in (image_set.train, image_set.validation):
    for encoded, label in map(split.read, range(len(split))):
      whole.update(np.array(Image.open(io.BytesIO(encoded))).tobytes() + bytes([label]))
  # Of `load_digits().images * 255 / 16`, rounded, with their labels.
  assert whole.hexdigest().startswith('f23ef9cc077638d15f69ce9d'), 'runs see other images'


def test_a_folder_has_its_classes_in_the_order_of_their_names(tmp_path):
  source = image_files.write_sets(tmp_path)
  image_set = _open(source)
  assert image_set.classes == ('ant', 'bee', 'cat') and image_set.channels == 3
  assert (len(image_set.train), len(image_set.validation)) == (36, 21)
  for split in (image_set.train, image_set.validation):
    for i in range(len(split)):
      assert Path(split.name(i)).parent.name == image_set.classes[split.read(i)[1]]
  shutil.rmtree(tmp_path / 'val/ant')
  validation = _open(source).validation
  labels = {validation.read(i)[1] for i in range(len(validation))}
  assert labels == {1, 2}, 'labels of validation do not go by the classes of training'


def test_the_split_of_a_folder_does_not_depend_on_how_its_path_is_spelled(tmp_path, monkeypatch):
  image_files.write_classes(tmp_path / 'sets', ('ant', 'bee'), 50)
  (tmp_path / 'mount').symlink_to(tmp_path / 'sets')
  shutil.copytree(tmp_path / 'sets', tmp_path / 'copy')
  monkeypatch.chdir(tmp_path)
  spellings = ('sets', './sets/', tmp_path / 'sets', tmp_path / 'mount/../sets', 'mount', 'copy')
  validation_names = []
  for spelling in spellings:
    split = _open(f'folder:{spelling}', validation_fraction=0.3).validation
    validation_names.append([Path(split.name(i)).parts[-2:] for i in range(len(split))])
  train = _open('folder:sets', validation_fraction=0.3).train
  train_names = {Path(train.name(i)).parts[-2:] for i in range(len(train))}
  assert 15 <= len(validation_names[0]) <= 45 and len(train_names) + len(validation_names[0]) == 100
  assert not train_names & set(validation_names[0])
  for spelling, names in zip(spellings, validation_names, strict=True):
    assert names == validation_names[0], (
      f'validation images of {spelling} were training images elsewhere'
    )


def test_the_split_of_a_tfds_set_does_not_depend_on_its_version_being_spelled(
  tmp_path, monkeypatch
):
  def numbers(spec):
    return _open(spec, validation_fraction=0.3).validation.numbers.tolist()

  builder = tiny_imagenet.TinyImagenet(data_dir=tmp_path, file_format='array_record')
  builder.download_and_prepare()
  monkeypatch.setattr(tfds, 'builder', lambda name, **_: builder)
  monkeypatch.setattr(images, '_VALIDATION_SPLITS', ())
  versioned = numbers('tfds:tiny_imagenet:5.1.0')
  assert numbers('tfds:tiny_imagenet') == versioned, 'a version moves images between the splits'
  name = _open('tfds:tiny_imagenet:5.1.0').validation.name(0)
  assert name.startswith('tfds:tiny_imagenet:5.1.0, train, example '), 'another source is named'


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
  source = image_files.write_sets(tmp_path)
  listed, failures = Path.iterdir, [errno.EIO, errno.EIO, errno.EACCES]

  def iterdir(self):
    if failures:
      raise OSError(code := failures.pop(0), os.strerror(code))
    return listed(self)

  monkeypatch.setattr(retry, 'PAUSES', (0.0,) * 3)
  monkeypatch.setattr(Path, 'iterdir', iterdir)
  with pytest.raises(UserError, match=r'cannot be listed \(Permission denied\)'):
    _open(source)
  assert not failures, 'a listing that fails for a moment is not tried again'
  assert len(_open(source).train) == 36


def test_a_class_without_images_is_named_and_left_out_or_fatal(tmp_path, capsys):
  source = image_files.write_sets(tmp_path)
  (tmp_path / 'train/bat').mkdir()
  (tmp_path / 'train/bat/notes.txt').write_text('none yet')
  assert _open(source).classes == ('ant', 'bee', 'cat')
  said = capsys.readouterr().err
  assert 'no images in 1 class folder of' in said and 'bat' in said and '1 file without' in said
  with pytest.raises(UserError, match=r'no images in 1 class folder of .*train: bat; add'):
    _open(source, on_bad_image='fail')


def _names(image_set: images.ImageSet) -> list[str]:
  return [
    split.name(i) for split in (image_set.train, image_set.validation) for i in range(len(split))
  ]


def test_files_and_folders_that_systems_hide_are_no_images(tmp_path):
  image_files.write_classes(tmp_path, ('ant', 'bee'), 20)
  (tmp_path / 'ant/._0.png').write_bytes(b'Mac OS X')
  for folder in ('.ipynb_checkpoints', 'ant/.ipynb_checkpoints', '__MACOSX/ant', 'bee/@eaDir'):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / '0.png').write_bytes(image_files.encoded(0))
  image_set = _open(f'folder:{tmp_path}')
  assert image_set.classes == ('ant', 'bee') and len(_names(image_set)) == 40


def test_links_to_folders_are_followed_once_and_missing_files_are_bad_images(tmp_path):
  root, store = tmp_path / 'set', tmp_path / 'store'
  image_files.write_classes(root, ('ant', 'bee'), 10)
  image_files.write_classes(store, ('new',), 20)
  (root / 'ant/more').symlink_to(store)
  (root / 'ant/again').symlink_to(store / 'new')
  (store / 'new/back').symlink_to(store)
  (root / 'bee/up').symlink_to(root)
  (root / 'wasp').symlink_to(store / 'new')
  (root / 'bee/gone.png').symlink_to(store / 'nothing.png')
  image_set = _open(f'folder:{root}')
  names = [os.path.relpath(name, root) for name in _names(image_set)]
  counts = [sum(name.startswith(one) for name in names) for one in ('ant', 'bee', 'wasp')]
  assert image_set.classes == ('ant', 'bee', 'wasp') and counts == [30, 11, 20]
  assert 'bee/gone.png' in names and not any('up' in Path(name).parts for name in names)


def test_names_that_are_not_utf_8_are_read_and_hashed(tmp_path):
  image_files.write_classes(tmp_path, ('ant', 'bee'), 20)
  os.rename(tmp_path / 'bee', os.path.join(os.fsencode(tmp_path), b'b\xe9'))
  os.rename(tmp_path / 'ant/0.png', os.path.join(os.fsencode(tmp_path), b'ant', b'caf\xe9.png'))
  image_set = _open(f'folder:{tmp_path}')
  assert len(image_set.classes) == 2 and len(_names(image_set)) == 40
  assert all(image_set.train.read(i)[0] for i in range(len(image_set.train)))


@pytest.mark.parametrize(
  ('source', 'sentence'),
  [
    ('stdlib', r"is 'stdlib'; for images it must be digits, tfds:NAME or folder:DIR"),
    ('folder:/nowhere', 'is folder:/nowhere, which is not a folder'),
    ('folder:gs://bucket/images', 'gs://bucket/images is not a path in a file system; mount'),
    ('tfds:no_such_set', r'tfds:no_such_set, which cannot be opened.*tfds build no_such_set'),
  ],
)
def test_a_source_that_is_not_of_images_is_refused(source, sentence):
  with pytest.raises(UserError, match=sentence):
    _open(source)


@pytest.mark.parametrize(
  ('train', 'held_out'),
  [
    ('Training', 'Testing'),
    ('TRAIN', 'Valid'),
    ('train', 'dev'),
    ('training_set', 'test_set'),
    ('seg_train', 'seg_test'),
    ('Train Images', 'Validation Images'),
    ('training', 'evaluation'),
  ],
)
def test_the_names_that_people_give_to_splits_are_read(tmp_path, train, held_out):
  image_files.write_classes(tmp_path / train, ('ant', 'bee'), 8)
  image_files.write_classes(tmp_path / held_out, ('ant', 'bee'), 4)
  image_set = _open(f'folder:{tmp_path}')
  assert image_set.classes == ('ant', 'bee'), 'a split became a class'
  assert (len(image_set.train), len(image_set.validation)) == (16, 8)


def test_validation_is_taken_before_test_and_what_is_left_out_is_named(tmp_path, capsys):
  for split, each in (('Train', 8), ('Test', 3), ('Valid', 2), ('single_prediction', 1)):
    image_files.write_classes(tmp_path / split, ('ant', 'bee'), each)
  assert len(_open(f'folder:{tmp_path}').validation) == 4
  said = 'trains on Train, validates on Valid, and leaves out Test, single_prediction'
  assert said in capsys.readouterr().err


@pytest.mark.parametrize(
  ('folders', 'sentence'),
  [
    (('ant', 'bee', 'testing'), 'has testing beside ant, bee: a split without its counterpart'),
    (('train', 'airplane'), 'has train beside airplane: a split without its counterpart'),
    (
      ('Train', 'training', 'val'),
      'has Train and training and val: a split without its counterpart, or twice',
    ),
    (('val', 'test'), 'has val and test: a split without its counterpart'),
  ],
)
def test_a_folder_whose_splits_are_not_clear_is_refused(tmp_path, folders, sentence):
  for folder in folders:
    image_files.write_classes(tmp_path / folder, ('one',), 2)
  with pytest.raises(UserError, match=sentence):
    _open(f'folder:{tmp_path}')


def test_classes_whose_names_resemble_splits_stay_classes(tmp_path):
  image_files.write_classes(tmp_path, ('invalid', 'valid', 'Test Tube', 'train_station'), 30)
  image_set = _open(f'folder:{tmp_path}')
  assert image_set.classes == ('Test Tube', 'invalid', 'train_station', 'valid')


def test_images_in_no_folder_of_a_class_have_no_labels(tmp_path, capsys):
  image_files.write_classes(tmp_path / 'train', ('ant', 'bee'), 8)
  (tmp_path / 'test').mkdir()
  (tmp_path / 'test/1.JPG').write_bytes(image_files.encoded(0, 'jpeg'))
  with pytest.raises(UserError, match=r'test has 1 image in no folder of a class, such as 1\.JPG'):
    _open(f'folder:{tmp_path}')
  image_files.write_classes(tmp_path / 'test', ('ant', 'bee'), 2)
  assert len(_open(f'folder:{tmp_path}').validation) == 4
  assert 'test: left out 1 file' in capsys.readouterr().err


def test_image_folders_that_do_not_fit_are_refused(tmp_path):
  source = image_files.write_sets(tmp_path)
  (tmp_path / 'val/cat').rename(tmp_path / 'val/dog')
  with pytest.raises(UserError, match=r'has 1 class that .* does not have: dog'):
    _open(source)
  shutil.rmtree(tmp_path / 'val')
  with pytest.raises(UserError, match='without its counterpart'):
    _open(source)
  empty = tmp_path / 'empty'
  empty.mkdir()
  with pytest.raises(UserError, match=r'the train split .* has no images'):
    _open(f'folder:{empty}')
