"""List a config's keys for `--help`, from the descriptions in their fields."""

import itertools
from typing import Any

from tokenformer_jax.cli import help_text
from tokenformer_jax.config import scope
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import Key, Leaf
from tokenformer_jax.config.section import leaves as leaves_of
from tokenformer_jax.config.sections import DataConfig, SourceConfig, Sources

_WIDEST = 48  # columns of a key and its default
_SCOPES = """\
[lm], [vit]: for this model.kind only. [KEY=VALUE]: for this value of another key of the group only.
Other marks: for this kind of the group only. A layer model.variants.NAME has the keys of
model.layer."""

_SHOWN = Config(data=DataConfig(mixture=Sources({'NAME': SourceConfig()})))


def render(word: str = '') -> str:
  """Return the keys as lines of text, each with its default, scope, choices and meaning.

  `word` is a group such as `optim` or `model.layer.mixer`, or else a word in the paths, choices or
  meanings of keys, to list these alone; empty: all. The text is empty if no key has the word.
  """
  leaves = _selected(word.lower())
  if not leaves:
    return ''
  paragraphs = [_SCOPES]
  seen: dict[tuple[str, Key], str] = {}
  for _, group in itertools.groupby(leaves, lambda leaf: leaf.path.partition('.')[0]):
    rows = [(f'  {leaf.path}={_written(leaf.value)}', _description(leaf, seen)) for leaf in group]
    width = max(len(name) for name, _ in rows)
    lines = (help_text.columns(name, text, min(width, _WIDEST)) for name, text in rows)
    paragraphs.append('\n'.join(itertools.chain.from_iterable(lines)))
  return '\n\n'.join(paragraphs)


def _written(value: Any) -> Any:
  """Return a value as a flag gives it."""
  return ','.join(value) if isinstance(value, tuple) else value


def _selected(word: str) -> list[Leaf]:
  """Return the keys of a group, or else those that have a word."""
  leaves = list(leaves_of(_SHOWN, every=True))
  in_group = [leaf for leaf in leaves if leaf.path.startswith(f'{word}.') or not word]

  def has(leaf: Leaf) -> bool:
    texts = (leaf.path, leaf.key.meaning, *leaf.key.choices)
    return any(word in text.lower() for text in texts)

  return in_group or list(filter(has, leaves))


def _description(leaf: Leaf, seen: dict[tuple[str, Key], str]) -> str:
  """Return the scope, choices and meaning of a key, or the path of an earlier key like it.

  `seen` has the paths of earlier keys by name and description; the function adds this key.
  """
  needed = ' and '.join(need.text for need in scope.needs(leaf.path))
  marks = leaf.kinds or tuple(filter(None, (scope.kind_of_model(leaf.path), needed)))
  text = f'[{", ".join(marks)}] ' if marks else ''
  same = (leaf.path.rpartition('.')[2], leaf.key)
  if same in seen:
    return f'{text}as {seen[same]}'
  seen[same] = leaf.path
  choices = ' | '.join(choice or "''" for choice in leaf.key.choices)
  return text + '; '.join(filter(None, [choices, leaf.key.meaning]))
