"""Resolve a run: what a user wrote meets a checkpoint, a teacher, a mesh and data.

facts.py    the facts of a run, each found once, and its complete config
origin.py   the checkpoint that a run continues from
teacher.py  the model that a run learns from
sizes.py    the sizes of a model that its data decides
adapt.py    a checkpoint's model with the classes and positions of other images
lengths.py  steps, and the position and order of the data, once the data is open
checks.py   the rules before data is read and afterwards
"""
