"""Mistakes about texts and their token stores: see `cases.py`."""

TEXTS = {
  'one object of JSON as a text': (
    'train {tiny} --config.data.source=files:{in}/object.json',
    '{in}/object.json, line 1, is not valid JSON',
  ),
  'a text that is named twice': (
    "train {tiny} '--config.data.source=files:{in}/some/*.txt + files:{in}/some/b.txt'",
    'files:{in}/some/b.txt has {in}/some/b.txt twice; leave it out of one of them',
  ),
  'a text that one source holds out and another trains on': (
    'train {tiny} --config.data.mixture.a.source=files:{in}/corpus/*.txt '
    '--config.data.mixture.a.weight=0.5 --config.data.mixture.b.weight=0.5 '
    '--config.data.mixture.a.validation_source=files:{in}/some/a.txt '
    '--config.data.mixture.b.source=files:{in}/some/*.txt',
    'config.data.mixture.b.source=files:{in}/some/*.txt has {in}/some/a.txt and '
    'config.data.mixture.a.validation_source=files:{in}/some/a.txt has it as well; leave it out',
  ),
  'a folder of the user as a store': (
    'verify --store={in}/mine',
    '{in}/mine/meta.json is damaged; a.txt is there as well, which belongs to no token store; name',
  ),
}
