r"""Write a page about one or more runs, which opens in any browser and needs no network.

  tokenformer report runs/lm_stdlib --out=report.html
  tokenformer report runs/small runs/medium runs/large --out=growth.html

The page has what the runs have: curves to hover over and zoom, by steps, tokens, FLOPs or hours;
the loss against FLOPs, with decays; the lineage of growths with sizes, losses and costs; speed, and
where wall time went; the keys in which the configs differ; samples; and of the last models the
usage of parameter tokens and the load of experts.

Runs are only read, so a run may be in progress. The models are read on the CPU.
"""

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs
from tokenformer_jax.config.arguments import Natural, Path
from tokenformer_jax.errors import UserError
from tokenformer_jax.report import MODELS


def main(*runs: str, out: Path = 'report.html', models: Natural = MODELS) -> None:
  """Write a page about runs.

  Args:
    *runs: Work directories, in the order of the page.
    out: The file to write: .html.
    models: Look into the models of at most N runs, the last ones; 0: no model is read.
  """
  import jax

  from tokenformer_jax.report import page

  if not runs:
    raise UserError(
      'no run is given; name one or more work directories, for example runs/lm_stdlib'
    )
  outputs.check_file('out', out, page.ENDINGS)
  # A run in progress may hold the accelerators.
  jax.config.update('jax_platforms', 'cpu')
  content = page.build(runs, models=models).html
  outputs.write_file('out', out, lambda path: path.write_text(content, 'utf-8'))
  print(out)


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
