"""Scaling laws: make runs of several sizes, fit a law to them, predict, and plan growth.

runs.py         size, length and loss of a finished run, and the data behind its loss
points.py       runs and CSV files as arrays of points
formulas.py     the law of the loss as a function of sizes and tokens; its optimum
fit.py          parameters by least Huber loss from many starts; bootstrap
analysis.py     the law of a set of points, predictions, and the doubts about them
mixing.py       the law of growth: how fast a grown model forgets that it was small
chains.py       the chain of sizes that reaches a loss at the least cost
report.py       the figures as text and as JSON
law_figures.py  the figures as pictures
grid.py         the grid of sizes and lengths that a law needs
grid_runs.py    make the runs of a grid that are missing, or write them as commands
"""

LARGEST_MIXING = 30.0  # γ; a gap that closes faster is closed
