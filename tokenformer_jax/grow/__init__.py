"""Grow a trained model without changing what it computes.

plan.py            the steps from a model to a larger one; whether they can be made, and are exact
steps/             the steps: views of the arrays of one model as those of another
apply.py           the arrays after some steps: in one function, or one after the other
subsets.py         the tokens to extract or to keep
merging.py         the tokens of another run behind one's own
groups.py          where each group of tokens comes from
grow_run.py        from one work directory to another, whole or not at all
check_capacity.py  the memory and the disk that an action needs
verify.py          the outputs of two models on the same batch
diff_table.py      the printed table of changes
payoff.py          what a growth is expected to save, and why that may not be known
derivation.py      from an open checkpoint to a new run: tables, checks, outputs, writing
actions.py         the actions of the command `grow`, which are methods of `Run`
"""
