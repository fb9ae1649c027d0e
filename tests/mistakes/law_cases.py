"""Mistakes with `sweep`, `family` and `laws`: see `cases.py`."""

_GRID = 'sweep --config={repo}/configs/lm_stdlib.py --out=x'

SWEEP = {
  'no lengths to sweep': (f'{_GRID} --factors=1', '--lengths is missing'),
  'half a head': (f'{_GRID} --factors=0.5 --lengths=1e6', 'makes 1.5 of mixer.heads=3'),
  'a factor without a model': (f'{_GRID} --factors=1e9 --lengths=1e6', 'a size must be less than'),
  'lengths that are too near': (
    f'{_GRID} --factors=1 --lengths=1e6,1000100',
    'where that of the length before begins',
  ),
  'images to sweep': (
    'sweep --config={repo}/configs/vit_digits.py --out=x --factors=1 --lengths=1e6',
    'model.kind=vit',
  ),
  'a folder for a sweep that is a file': (
    'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out={in}/some/a.txt',
    '--out={in}/some/a.txt cannot be a folder: {in}/some/a.txt is a file; name another --out',
  ),
  'a run for a folder of runs': (
    'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out={lm}',
    '--out={lm} is the work directory of a run, and the runs of this command are below --out',
  ),
  'a folder for a sweep that cannot be made': (
    'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out=/proc/x',
    '--out=/proc/x cannot be written',
  ),
  'a number of steps to sweep with': (
    f'{_GRID} --factors=1 --lengths=1e6 --config.train.steps=10',
    '--config.train.steps has no effect here, because --lengths says how long the runs are',
  ),
  'a schedule to sweep with': (
    f'{_GRID} --factors=1 --lengths=1e6 --config.optim.schedule=cosine',
    '--config.optim.schedule has no effect here, because a stable run keeps its rate constant',
  ),
  'a length of ages': (f'{_GRID} --factors=1 --lengths=1e18', 'a run has less than 2,147,483,648'),
  'a size without bounds': (f'{_GRID} --factors=1e300 --lengths=1e6', '--factors has 1e+300'),
}

_FAMILY = 'family --config={repo}/configs/lm_stdlib.py --out=x --sizes=1,2'
_LONG = f'{_FAMILY} --tokens=1e7'

FAMILY = {
  'no tokens of a family': (_FAMILY, '--tokens is missing'),
  'a family whose sizes fall': (f'{_LONG} --sizes=2,1', '--sizes has 1 after 2; name rising sizes'),
  'a third of a token': (f'{_LONG} --sizes=0.001,1', 'it must make a whole number of at least 1'),
  'growth from the top': (
    f'{_LONG} --method=top_down --grow_at=0.5',
    '--grow_at has an effect only with --method=bottom_up; leave it out',
  ),
  'a share from the bottom': (
    f'{_LONG} --share=0.3',
    '--share has an effect only with --method=top_down or elastic; leave it out',
  ),
  'a growth after all tokens': (f'{_LONG} --grow_at=1.5', 'grow earlier'),
  'a growth for nothing': (f'{_LONG} --grow_at=0.3,0.4', '2 sizes have 1 growth'),
  'a schedule of a family': (
    f'{_LONG} --config.optim.schedule=cosine',
    '--config.optim.schedule=cosine has no effect here',
  ),
  'prefixes by a key': (
    f'{_LONG} --config.train.drop_groups=0.5',
    '--config.train.drop_groups has no effect here, because --method=elastic says it',
  ),
  'a family of images': (
    'family --config={repo}/configs/vit_digits.py --out=x --sizes=1,2 --tokens=1e6',
    'the config has model.kind=vit, whose loss is a mean over images, and a family is about',
  ),
}

_RUN = 'laws {lm}'

LAWS = {
  'nothing to fit': ('laws', 'give work directories'),
  'a folder that is not there to fit': ('laws none', 'there is no folder none'),
  'a folder without runs to fit': ('laws {in}/some', '{in}/some holds no run'),
  'an unfinished run to fit': ('laws {lm}', '{lm} is not finished: it is at step 2 of 20'),
  'a run of images to fit': ('laws {vit}', 'images'),
  'a size without a length': (f'{_RUN} --parameters=1e9', '--tokens is missing'),
  'a target without sizes': (f'{_RUN} --target_loss=2', 'give --sizes=N,N,… or --stages=FILE'),
  'sizes without a target': (f'{_RUN} --sizes=1e8', 'only with --target_loss=X'),
  'a chain in words': (f'{_RUN} --chain=small', "--chain has 'small'"),
  'a chain that shrinks': (
    f'{_RUN} --chain=1e9:1e9,1e8:1e9',
    "--chain has '1e8:1e9' after a size of 1e+09; a growth makes a model larger, so give rising",
  ),
  'two mixing exponents': (
    f'{_RUN} --target_loss=2 --sizes=1e8 --mixing=2 --grown={{lm}}',
    '--mixing and --grown both say',
  ),
  'a growth time in FLOPs': (
    f'{_RUN} --target_loss=2 --sizes=1e8 --growth_time=1',
    '--growth_time has an effect only with --target_loss=X and --stages',
  ),
  'stages that are not there': (
    f'{_RUN} --target_loss=1.9 --stages=none.csv',
    '--stages=none.csv cannot be read',
  ),
  'pictures in a file': (f'{_RUN} --pictures={{in}}/some/a.txt', '--pictures'),
  'figures in no folder': (f'{_RUN} --json=none/x.json', 'there is no folder none'),
}
