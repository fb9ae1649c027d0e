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
  'a checker for no checks': (
    'train --config.train.device_checker=sdc_checker',
    "config.train.device_checker is 'sdc_checker', which has a meaning for train.check_devices "
    'only',
  ),
  'a checker that is none': (
    'train --config.train.check_devices=9 --config.train.device_checker=twice',
    "config.train.device_checker is 'twice'; it must be one of repeat, sdc_checker",
  ),
  'the checker of TPUs on a CPU': (
    'train {tiny} --config.train.check_devices=9 --config.train.device_checker=sdc_checker',
    'config.train.device_checker is sdc_checker, a part of the TPU compiler, and the devices are '
    'of the platform cpu; set it to repeat',
  ),
  'a folder that is not there for faulty hosts': (
    'train {tiny} --faulty_hosts=none/hosts',
    '--faulty_hosts=none/hosts cannot be written: there is no folder none',
  ),
}
