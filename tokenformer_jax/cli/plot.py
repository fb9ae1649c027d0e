r"""Draw the curves of one or more runs.

tokenformer plot runs/lm_stdlib runs/transformer_stdlib --x=flops --out=loss.png
"""

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs
from tokenformer_jax.config.arguments import Path, Text
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs.pictures import XAxis


def main(*runs: str, x: XAxis = 'steps', y: Text = 'train/loss', out: Path = 'curves.png') -> None:
  """Draw the curves of runs.

  Args:
    *runs: Work directories.
    x: The unit of the x axis.
    y: A metric; eval/NAME is drawn beside train/NAME.
    out: The file to write: .png, .pdf or .svg.
  """
  from tokenformer_jax.runs import curves
  from tokenformer_jax.storage import paths

  if not runs:
    raise UserError(
      'no run is given; name one or more work directories, for example runs/lm_stdlib'
    )
  outputs.check_file('out', out, paths.PICTURES)
  outputs.write_file('out', out, curves.draw(runs, x, y).savefig)
  print(out)


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
