"""Write numbers and tables as HTML. Every text from a run is escaped."""

import html
from collections.abc import Mapping, Sequence

_POWERS = ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k'))
ABSENT = '–'


def amount(value: float | None) -> str:
  """Return a count in short form, such as 12.3 M."""
  if value is None:
    return ABSENT
  for power, name in _POWERS:
    if abs(value) >= power:
      return f'{digits(value / power)} {name}'
  return f'{value:,.6g}'


def digits(value: float) -> str:
  """Return a number with three significant digits, or all digits before the point."""
  return f'{value:,.0f}' if abs(value) >= 99.95 else f'{value:#.3g}'


def flops(value: float | None) -> str:
  """Return a number of FLOPs, such as 1.23e+9, as plotly writes it."""
  return ABSENT if value is None else f'{value:.2e}'.replace('e+0', 'e+')


def loss(value: float | None) -> str:
  """Return a loss, or bits per byte, with four digits after the point."""
  return ABSENT if value is None else f'{value:.4f}'


def duration(seconds: float | None) -> str:
  """Return a time in the unit that suits it."""
  if seconds is None:
    return ABSENT
  for unit, name in ((86400, 'd'), (3600, 'h'), (60, 'min')):
    if seconds >= 2 * unit:
      return f'{digits(seconds / unit)} {name}'
  return f'{digits(seconds)} s' if seconds else '0 s'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
  """Return a table of HTML; the first `texts` columns are texts, the others numbers.

  Columns of numbers that no row has are left out.
  """
  kept = [i for i in range(len(head)) if i < texts or any(row[i] != ABSENT for row in rows)]
  head, rows = [head[i] for i in kept], [[row[i] for i in kept] for row in rows]
  cells = ''.join(f'<th{_class(i, texts)}>{html.escape(name)}</th>' for i, name in enumerate(head))
  body = ''.join(
    f'<tr>{"".join(f"<td{_class(i, texts)}>{html.escape(c)}</td>" for i, c in enumerate(row))}</tr>'
    for row in rows
  )
  return (
    f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
  )


def table_of_dicts(rows: Sequence[Mapping[str, str]], *, texts: int = 1) -> str:
  """Return a table as `table` does, of one row or more with the heads of the columns as keys."""
  return table([*rows[0]], [[*row.values()] for row in rows], texts=texts)


def paragraph(text: str) -> str:
  """Return a paragraph of plain text."""
  return f'<p>{html.escape(text)}</p>'


def _class(column: int, texts: int) -> str:
  return '' if column < texts else ' class="n"'
