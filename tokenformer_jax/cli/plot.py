r"""Draw the curves of one or more runs.

tokenformer plot runs/lm_stdlib runs/transformer_stdlib --x=flops --out=loss.png
"""

from collections.abc import Sequence

from absl import flags

from tokenformer_jax.cli import main as cli
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import curves
from tokenformer_jax.storage import paths


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_enum('x', 'steps', curves.X_AXES, 'The unit of the x axis.')
  flags.DEFINE_string('y', 'train/loss', 'A metric; eval/NAME is drawn beside train/NAME.')
  flags.DEFINE_string('out', 'curves.png', 'The file to write: .png, .pdf or .svg.')


def main(argv: Sequence[str]) -> None:
  """Draw the runs in `argv` and write the file."""
  values, runs = flags.FLAGS, argv[1:]
  if not runs:
    raise UserError(
      'no run is given; name one or more work directories, for example runs/lm_stdlib'
    )
  cli.output_file('out', paths.PICTURES)
  cli.write_output('out', curves.draw(runs, values.x, values.y).savefig)
  print(values.out)


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True, on_all_hosts=False)
