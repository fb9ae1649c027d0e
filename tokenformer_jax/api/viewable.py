"""Show a run and look into its model: the methods of `Run` that draw, report and inspect."""

from __future__ import annotations  # so that help() shows the names of types

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from tokenformer_jax.api.loaded import Loaded, rows_of_ids
from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import FILLED, Count, Natural, Path
from tokenformer_jax.config.section import Str
from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding import trained
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.inspection import heat_map
from tokenformer_jax.inspection import model as inspect_model
from tokenformer_jax.inspection import report as inspect_report
from tokenformer_jax.inspection.usage import Usage
from tokenformer_jax.report import page
from tokenformer_jax.report.page import Page
from tokenformer_jax.runs import checkpoint, curves
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Layers = Annotated[Sequence[Natural], FILLED]


@arguments.checked
class Viewable:
  """A run that can be shown; `Run` sets these attributes."""

  directory: paths.Path
  meta: Meta
  source: str
  _loaded: Loaded

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """Return the tokenizer of a language model."""
    self._check_is_language_model()
    return tokenizers.from_json(self.meta.tokenizer)

  def _check_is_language_model(self) -> None:
    checkpoint.check_is_language_model(self.meta, self.directory)

  def _rows(self, inputs: Any) -> list[np.ndarray]:
    """Return the token ids of a text, or of several."""
    self._check_is_language_model()
    return rows_of_ids(inputs, self.tokenizer, self.meta.config.model.vocab_size)

  def maps(self, text: Str, layers: Layers | None = None) -> dict[int, dict[str, np.ndarray]]:
    """Return the weights of the parameter tokens for each token of a text.

      run.maps('def main(', layers=[0])[0]['ffn']    [T, N]; run.labels('def main(') names the rows

    Args:
      text: the text, read as the beginning of a document.
      layers: indices of layers from 0; None: all.

    Returns:
      float32 [T, N] by layer and kind of projection (query, key, value, proj, ffn).

    Raises:
      UserError: the model has neither parameter tokens nor MLPs, or a layer does not exist.
    """
    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.maps(self._loaded.model, self._rows(text)[0], layers)

  def labels(self, text: Str) -> list[str]:
    """Return the tokens of a text in the order of `maps`, with visible white space."""
    return inspect_report.labels(self.tokenizer, self._rows(text)[0].tolist())

  @property
  def old_tokens(self) -> dict[int, dict[str, int]] | None:
    """Return the tokens before the last growth, by layer and kind; None if it added none."""
    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.old_tokens(self._loaded.model)

  def usage(self, text: Str | None = None, tokens: Count = 32768) -> dict[int, dict[str, Usage]]:
    """Return how much each parameter token is used, by layer and kind of projection.

      run.usage()[0]['ffn'].unused      [N]

    Args:
      text: the text to measure on; None: text that the run was not trained on.
      tokens: the most tokens of the text to use.

    Raises:
      UserError: the model has neither parameter tokens nor MLPs.
    """
    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.measure_text(self._loaded.model, text, tokens)

  def plot_maps(self, text: Str, layers: Layers | None = None) -> Figure:
    """Draw `maps` with a panel for each layer and kind, and a line between old and new tokens."""
    heat_map.check()
    return heat_map.draw(self.maps(text, layers), self.labels(text), self.old_tokens)

  def plot(
    self,
    y: Str = 'train/loss',
    x: curves.XAxis = 'steps',
    *,
    beside: Sequence[Viewable | Path] = (),
  ) -> Figure:
    """Draw a metric of training against steps, examples, tokens or FLOPs.

      run.plot('train/bits_per_byte', beside=[other])

    Args:
      y: a metric; `eval/NAME` is drawn beside `train/NAME`.
      x: steps, examples, tokens or flops; flops count every step at the size that the model had.
      beside: more runs for the same figure.

    Raises:
      UserError: a run has no such metric, or matplotlib is not installed.
    """
    others = [str(one.directory if isinstance(one, Viewable) else one) for one in beside]
    return curves.draw([str(self.directory), *others], x, y)

  def report(
    self, *, beside: Sequence[Viewable | Path] = (), models: Natural = page.MODELS
  ) -> Page:
    """Return a page about this run and others: what the command `report` writes.

      run.report()                                      shown inline at the end of a notebook's cell
      large.report(beside=[small, medium]).write('growth.html')

    Args:
      beside: other runs, which come before this one on the page.
      models: look into the models of at most so many runs, the last ones, this one first of all.

    Raises:
      UserError: plotly is not installed, or a run has no figures.
    """

    def load(source: str) -> Trained:
      return self._loaded.model if source == self.source else trained.load(source)

    others = [str(one.directory if isinstance(one, Viewable) else one) for one in beside]
    return page.build([*others, str(self.directory)], models=models, load=load)

  def metrics(self) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl: `step`, and figures such as `train/loss`.

    Raises:
      UserError: the run has no metrics, for example because it was converted.
    """
    return curves.read(self.directory)
