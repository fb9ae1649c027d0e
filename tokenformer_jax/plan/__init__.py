"""Planning: whether a run fits on a topology and how fast it will be, before there is one.

chips.py        what is published of chips
topology.py     `v5p:4x4x4`, and its devices
program.py      the training step, compiled for them; its memory
early.py        what the compiler has settled after seconds
hlo.py walk.py  the program's text taken apart; how often every instruction runs
costs.py        cycles, FLOPs and collectives of a step (matmuls.py, elementwise.py, collectives.py)
formulas.py     the same by formula, for GPUs
estimate.py     the plan: times, MFU, hours
table.py        as text
sweep.py        the fastest of several
chain.py        growth chains
command.py      `python -m tokenformer_jax.plan`
"""
