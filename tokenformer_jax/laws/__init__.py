"""Scaling laws: make runs of several sizes, fit laws to them, predict, and plan growth.

runs.py         sizes, lengths and FLOPs of a finished run, and the data behind its loss
points.py       runs and CSV files as arrays of points
formulas.py     the laws as functions of sizes and tokens; their optima
fit.py          parameters by least Huber loss from many starts; bootstrap
frontier.py     the envelope and the IsoFLOP parabolas
analysis.py     all laws of a set of points, and the doubts about them
stages.py       the sizes of a chain and their costs
growth.py       chains that grow, by dynamic programming over the loss
mixing.py       chains that grow, by how fast a grown model forgets that it was small
report.py       the figures as text and as JSON
picture.py      the figures as pictures
grid.py         the grid of sizes and lengths that a law needs
grid_runs.py    make the runs of a grid that are missing, or write them as commands
"""
