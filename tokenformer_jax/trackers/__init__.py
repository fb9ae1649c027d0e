"""Trackers, which show the figures of a run beside its metrics.jsonl.

`tracker.py` is the interface, `feed.py` the thread on which a tracker works, and every other file
one tracker or several that are alike. The table of trackers is `config.trackers`.
"""
