"""A family: models of several sizes from one config, by growth, shrinking, prefixes, or apart.

jobs.py         the runs of each method as data
make.py         make a run that is missing: train, shrink, slice, and measure
result.py       sizes, tokens, FLOPs and losses of a finished family; its JSON file
"""

RATE_POWER = -0.75  # by default, as for a growth: see `grow.plan.rate_factor`
