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
  'deviations below the mean': (
    'train --config.optim.skip_deviations=-6',
    'config.optim.skip_deviations is -6.0; it must not be negative',
  ),
  'a guard that may skip no step': (
    'train --config.optim.skip_deviations=6 --config.train.max_skipped_steps=1',
    'with config.train.max_skipped_steps=1 no outlier would be skipped; set that to 2 or more, or '
    'skip_deviations to 0',
  ),
  'a negative number of steps between checks': (
    'train --config.train.check_devices=-1',
    'config.train.check_devices is -1; it must not be negative',
  ),
  'a folder that is not there for faulty hosts': (
    'train {tiny} --faulty_hosts=none/hosts',
    '--faulty_hosts=none/hosts cannot be written: there is no folder none',
  ),
}
