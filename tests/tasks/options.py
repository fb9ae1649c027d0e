"""A sentence with a gap: the contexts are what is before it with each of the options."""

from typing import Any


def right_option(doc: dict[str, Any]) -> int:
  return int(doc['answer']) - 1


def contexts(doc: dict[str, Any]) -> list[str]:
  before = doc['sentence'].partition('_')[0]
  return [before + doc['option1'], before + doc['option2']]


def rest(doc: dict[str, Any]) -> str:
  return doc['sentence'].partition('_')[2]
