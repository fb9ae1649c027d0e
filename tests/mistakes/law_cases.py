"""Mistakes with `sweep`, `family` and `laws`: see `cases.py`."""

_GRID = 'sweep --config={repo}/configs/lm_stdlib.py --out=x'

SWEEP = {
  f'{_GRID} --factors=1': '--lengths is missing',
  f'{_GRID} --factors=0.5 --lengths=1e6': 'makes 1.5 of mixer.heads=3',
  f'{_GRID} --factors=1e9 --lengths=1e6': 'a size must be less than',
  f'{_GRID} --factors=1 --lengths=1e6,1000100': 'where that of the length before begins',
  'sweep --config={repo}/configs/vit_digits.py --out=x --factors=1 --lengths=1e6': 'model.kind=vit',
  'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out={in}/some/a.txt': (
    '--out={in}/some/a.txt cannot be a folder: {in}/some/a.txt is a file; name another --out'
  ),
  'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out={lm}': (
    '--out={lm} is the work directory of a run, and the runs of this command are below --out'
  ),
  'sweep --config={repo}/configs/lm_stdlib.py --factors=1 --lengths=1e6 --out=/proc/x': (
    '--out=/proc/x cannot be written'
  ),
  f'{_GRID} --factors=1 --lengths=1e6 --config.train.steps=10': (
    '--config.train.steps has no effect here, because --lengths says how long the runs are'
  ),
  f'{_GRID} --factors=1 --lengths=1e6 --config.optim.schedule=cosine': (
    '--config.optim.schedule has no effect here, because a stable run keeps its rate constant'
  ),
  f'{_GRID} --factors=1 --lengths=1e18': 'a run has less than 2,147,483,648',
  f'{_GRID} --factors=1e300 --lengths=1e6': '--factors has 1e+300',
}

_FAMILY = 'family --config={repo}/configs/lm_stdlib.py --out=x --sizes=1,2'
_LONG = f'{_FAMILY} --tokens=1e7'

FAMILY = {
  _FAMILY: '--tokens is missing',
  f'{_LONG} --sizes=2,1': '--sizes has 1 after 2; name rising sizes',
  f'{_LONG} --sizes=0.001,1': 'it must make a whole number of at least 1',
  f'{_LONG} --method=top_down --grow_at=0.5': (
    '--grow_at has an effect only with --method=bottom_up; leave it out'
  ),
  f'{_LONG} --share=0.3': ('--share has an effect only with --method=top_down; leave it out'),
  f'{_LONG} --grow_at=1.5': 'grow earlier',
  f'{_LONG} --grow_at=0.3,0.4': '2 sizes have 1 growth',
  f'{_LONG} --config.optim.schedule=cosine': '--config.optim.schedule=cosine has no effect here',
  f'{_LONG} --config.train.nested_rows=4': (
    '--config.train.nested_rows has no effect here, because --method=elastic says it'
  ),
  'family --config={repo}/configs/vit_digits.py --out=x --sizes=1,2 --tokens=1e6': (
    'the config has model.kind=vit, whose loss is a mean over images, and a family is about'
  ),
}

_RUN = 'laws {lm}'

LAWS = {
  'laws': 'give work directories',
  'laws none': 'there is no folder none',
  'laws {in}/some': '{in}/some holds no run',
  'laws {lm}': '{lm} is not finished: it is at step 2 of 20',
  'laws {vit}': 'images',
  f'{_RUN} --parameters=1e9': '--tokens is missing',
  f'{_RUN} --target_loss=2': 'give --sizes=N,N,… or --stages=FILE',
  f'{_RUN} --sizes=1e8': 'only with --target_loss=X',
  f'{_RUN} --chain=small': "--chain has 'small'",
  f'{_RUN} --chain=1e9:1e9,1e8:1e9': (
    "--chain has '1e8:1e9' after a size of 1e+09; a growth makes a model larger, so give rising"
  ),
  f'{_RUN} --target_loss=2 --sizes=1e8 --mixing=2 --grown={{lm}}': '--mixing and --grown both say',
  f'{_RUN} --target_loss=2 --sizes=1e8 --growth_time=1': (
    '--growth_time has an effect only with --target_loss=X and --stages'
  ),
  f'{_RUN} --target_loss=1.9 --stages=none.csv': '--stages=none.csv cannot be read',
  f'{_RUN} --pictures={{in}}/some/a.txt': '--pictures',
  f'{_RUN} --json=none/x.json': 'there is no folder none',
}
