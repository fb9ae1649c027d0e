"""Mistakes about texts and their token stores: see `cases.py`."""

TEXTS = {
  'one object of JSON as a text': (
    'train {tiny} --config.data.source=files:{in}/object.json',
    '{in}/object.json is one JSON object on several lines, which is neither a text nor rows',
  ),
  'a text that is named twice': (
    "train {tiny} '--config.data.source=files:{in}/some/*.txt + files:{in}/some/b.txt'",
    'files:{in}/some/b.txt, which names {in}/some/b.txt twice; leave one of them out',
  ),
  'a text that one source holds out and another trains on': (
    'train {tiny} --config.data.mixture.a.source=files:{in}/corpus/*.txt '
    '--config.data.mixture.a.weight=0.5 --config.data.mixture.b.weight=0.5 '
    '--config.data.mixture.a.validation_source=files:{in}/some/a.txt '
    '--config.data.mixture.b.source=files:{in}/some/*.txt',
    'config.data.mixture.b.source is files:{in}/some/*.txt, and {in}/some/a.txt is also in '
    'config.data.mixture.a.validation_source=files:{in}/some/a.txt; leave it out of one of them',
  ),
  'a folder of the user as a store': (
    'verify --store={in}/mine',
    '{in}/mine/meta.json is damaged; a.txt is there as well, which belongs to no token store; name',
  ),
}
