"""Mistakes about texts and their token stores: see `cases.py`."""

TEXTS = {
  'a text that is named twice': (
    "train {tiny} '--config.data.source=files:{in}/some/*.txt + files:{in}/some/b.txt'",
    'files:{in}/some/b.txt has {in}/some/b.txt twice; leave it out of one of them',
  ),
  'a folder of the user as a store': (
    'verify --store={in}/mine',
    '{in}/mine/meta.json is damaged; if {in}/mine is a token store, remove it',
  ),
}
