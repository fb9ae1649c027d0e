"""Compile single products for two chips: their schedule and what the matrix units need.

Needs libtpu. The programs and their limits are those of `single_programs.py`, with libtpu 0.0.42.1.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('libtpu', reason='pip install -e ".[tpu]" brings the compiler')
pytestmark = pytest.mark.slow

# By topology: the limits of the slots of the matrix units that a schedule uses, over those that the
# products need (see `operations.py`), and the most times that a program may take of that need.
PROGRAMS = {
  'v5p:2x2x1': (0.7, 1.0, {'product:1536x6144': 1.02}),
  'v6e:2x2': (0.95, 1.1, {'gelu:1536x1536': 1.06}),
}


def _compile(topology, programs):
  script = Path(__file__).with_name('single_programs.py')
  done = subprocess.run(
    [sys.executable, script, topology, *programs], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout)


@pytest.mark.parametrize('topology', PROGRAMS)
def test_products_take_what_the_matrix_units_need_and_little_more(topology):
  low, high, limits = PROGRAMS[topology]
  for name, figures in _compile(topology, limits).items():
    ratio = figures['scheduled'] / figures['matrix']
    assert 1 <= ratio <= limits[name], f'{name} takes {ratio:.2f} times the need of its products'
    slots = figures['slots'] / figures['matrix']
    assert low <= slots <= high, f'the slots of {name} are {slots:.2f} of its products'
