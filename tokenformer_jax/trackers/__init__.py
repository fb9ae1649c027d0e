"""Trackers, which show the figures of a run beside its metrics.jsonl.

`tracker.py` is the interface. `feed.py` has the table of trackers, and the thread on which one
works. Every other file has one tracker or several that are alike.
"""
