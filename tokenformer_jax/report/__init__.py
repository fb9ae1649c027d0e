"""The report on runs: one page of HTML that needs nothing else, with charts by plotly.

record.py       what a run has written, read once
charts.py       figures by step, tokens, FLOPs and hours; the loss against FLOPs
lineage.py      the stages that models grew through, their costs and losses
spending.py     speed, and where wall time went
looks.py        the tables of `inspect`: usage of parameter tokens, load of experts
differences.py  an overview of the runs, and the keys in which their configs differ
tables.py       numbers and tables as HTML
page.py         the page; page.js and page.css are inside it
"""

MODELS = 3  # that a report looks into unless more are asked for
