"""Grow a trained model without changing what it computes.

  tokens.py   more parameter tokens (the point of a TokenFormer), and fewer; parts of a model
  depth.py    more layers
  widen.py    a wider Transformer, the baseline: Net2Net and HyperCloning
  experts.py  routed experts: the models before and after
  arrays.py   the stages of a growth, array by array; expert_arrays.py is that of experts
  state.py    checks, whether a growth is exact, and the pure function over a whole state
  groups.py   where each group of tokens comes from
  room.py     checks of memory and disk
  files.py    growth from one work directory to another, array by array, whole or not at all
  actions.py  the table of actions for the command `grow` and the methods of `Run`
  larger.py   the actions that add: grow and merge
  merging.py  the tokens of another run behind one's own
  as_tokens.py  matrices as parameter tokens
  job.py      an action's source, target and checks

`grow` is that pure function; `train.py` uses it for `config.init_from`.
"""

from tokenformer_jax.grow.state import grow, grown_model, inexact
from tokenformer_jax.grow.tokens import extract, merge, remove, shrink

__all__ = [
  'extract',
  'grow',
  'grown_model',
  'inexact',
  'merge',
  'remove',
  'shrink',
]
