"""The steps of a growth, one file for each kind: see `step.py`."""
