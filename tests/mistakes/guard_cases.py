"""Mistakes with the guards of a run: see cases.py."""

GUARDS = {
  'a window for no guard': (
    'train --config.optim.skip_window=64',
    'config.optim.skip_window is 64, which has a meaning for optim.skip_deviations only, and that '
    'is not set; leave it out',
  ),
  'a window of three steps': (
    'train --config.optim.skip_deviations=6 --config.optim.skip_window=3',
    'config.optim.skip_window is 3; it must be at least 4',
  ),
  'a guard that may skip no step': (
    'train --config.optim.skip_deviations=6 --config.train.max_skipped_steps=1',
    'with config.train.max_skipped_steps=1 no outlier would be skipped; set that to 2 or more, or '
    'skip_deviations to 0',
  ),
  'a folder that is not there for faulty hosts': (
    'train {tiny} --faulty_hosts=none/hosts',
    '--faulty_hosts=none/hosts cannot be written: there is no folder none',
  ),
}
