"""Work with runs from Python: the interface of `import tokenformer_jax` for notebooks and scripts.

A `Run` is a work directory and one of its checkpoints. Its methods call the same functions as the
commands, and keep arrays and programs in memory. A mistake raises a `UserError` of one sentence.
"""

from __future__ import annotations  # so that help() shows the names of types

import dataclasses
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec

import ml_collections
from pydantic import Field, InstanceOf

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ViTConfig, arguments, at_stage, stages_after
from tokenformer_jax.config import file as config_file
from tokenformer_jax.config.arguments import FILLED, REPEATED, Count, Natural, Path, Text
from tokenformer_jax.config.section import Bool, Float, Long, Str
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import actions
from tokenformer_jax.report import MODELS
from tokenformer_jax.runs.pictures import XAxis

if TYPE_CHECKING:
  import jax
  import numpy as np
  from matplotlib.figure import Figure

  from tokenformer_jax.data.tokenizers import Tokenizer
  from tokenformer_jax.decoding.sampling import Sampling
  from tokenformer_jax.decoding.score import Scorer
  from tokenformer_jax.decoding.trained import Trained
  from tokenformer_jax.decoding.writer import Writer
  from tokenformer_jax.grow.derivation import Made, Parent
  from tokenformer_jax.inspection.usage import Usage
  from tokenformer_jax.model.params import Params
  from tokenformer_jax.report.page import Page
  from tokenformer_jax.runs.checkpoint_meta import Meta
  from tokenformer_jax.storage import paths
  from tokenformer_jax.tasks import Batch, Task

_Arguments = ParamSpec('_Arguments')
Layers = Annotated[Sequence[Natural], FILLED]
Temperature = Annotated[Float, Field(ge=0)]
TopP = Annotated[Float, Field(gt=0, le=1)]
Seed = Annotated[Long, Field(ge=0, lt=2**32)]


@arguments.checked
def load(source: Path) -> Run:
  """Open a run.

    run = tokenformer_jax.load('runs/lm_stdlib')       the newest checkpoint
    run = tokenformer_jax.load('runs/lm_stdlib@375')   the checkpoint of a step

  Raises:
    UserError: the run or the step does not exist, or the checkpoint does not hold a model.
  """
  from tokenformer_jax.runs import checkpoint

  opened = checkpoint.open_source(os.fspath(source))
  return Run(opened.directory, opened.meta)


@arguments.checked
def train(
  config: InstanceOf[Config] | ml_collections.ConfigDict | Path, workdir: Path, **changes: Any
) -> Run:
  """Train a model, or resume the run in the work directory.

    c = tokenformer_jax.config.defaults()
    run = tokenformer_jax.train(c, 'runs/small', model={'pattern': 'layer*2'}, train={'steps': 300})

  Args:
    config: from `config.defaults()`, from `Run.config`, or a file: FILE.py, FILE.py:VARIANT or the
      name of a config that comes with the package, such as `vit_digits`.
    workdir: the directory for checkpoints and figures; made if it does not exist.
    **changes: other values, by section of keys: `optim={'learning_rate': 1e-3}`.

  Returns:
    The run at its last step.

  Raises:
    UserError: a value is not allowed, or any other mistake that the command `train` reports.
  """
  from tokenformer_jax.training import loop

  loop.train(config_file.from_argument(config, **changes), workdir)
  return load(workdir)


@arguments.checked
def bring(
  source: Path,
  target: Path | None = None,
  *,
  tokenizer: Str | Path = '',
  sequence_length: Count | None = None,
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  allow_nonfinite: Bool = False,
  adapters: Sequence[Path] = (),
  heads: Count | None = None,
  rotary_fraction: Float | None = None,
  score: Literal['l2_norm_gelu', 'gelu_l2_norm', 'softmax'] = 'l2_norm_gelu',
) -> Run:
  """Make a run of a folder that transformers loads, or of released TokenFormer weights.

    run = tokenformer_jax.bring('ORG/NAME')  # or ORG/NAME@REVISION, from the hub
    run = tokenformer_jax.bring('llama', 'runs/llama')

  docs/transformers.md lists the families. The parameters alone are taken: training from the run
  starts with moments of zero.

  Args:
    source: A folder as on the hub, ORG/NAME[@REVISION] or its page there, or released weights.
    target: The new work directory; default: runs/NAME, by the name of the source.
    tokenizer: A tokenizer.json, bytes, or a run whose tokenizer to take; default: the source's.
    sequence_length: For later training; default: 2048, or the fewer positions of a folder.
    dtype: Of the stored parameters.
    allow_nonfinite: Accept weights that are NaN or infinite.
    adapters: Folders with LoRA adapters of PEFT for this model, each of which becomes a group.
    heads: Of released weights: attention heads; default: by the width, as released.
    rotary_fraction: Of released weights: the rotated part of each head; default: 0.25, as released.
    score: Of released weights, which do not record the score function: norm_activation_type in
      the config of the training.

  Raises:
    UserError: the model is of no known family or has an option that we do not have, a tensor is
      missing, the tokenizer does not fit, or the target exists. Nothing is written then.
  """
  from tokenformer_jax.convert import hub_download, to_run
  from tokenformer_jax.storage import paths

  name = hub_download.of_page(os.fspath(source)).partition('@')[0]
  target = target or pathlib.Path('runs', pathlib.Path(name).name)
  to_run.to_jax(
    hub_download.find(source, os.fspath(tokenizer)),
    paths.parse_path(target),
    tokenizer=os.fspath(tokenizer),
    sequence_length=sequence_length,
    dtype=dtype,
    allow_nonfinite=allow_nonfinite,
    adapters=[paths.local(folder) for folder in adapters],
    heads=heads,
    rotary_fraction=rotary_fraction,
    score=score,
  )
  return load(target)


def _method(
  action: Callable[Concatenate[Parent, _Arguments], Made],
) -> Callable[Concatenate[Run, _Arguments], Run]:
  """Return an action of growth as a method, which returns the run that it wrote, or this one."""

  @functools.wraps(action)
  def method(self: Run, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Run:
    from tokenformer_jax.grow.derivation import Parent

    made = action(Parent(self.source), *args, **kwargs)
    return self if made is None else load(made)

  signature = inspect.signature(action)
  this = inspect.Parameter('self', inspect.Parameter.POSITIONAL_OR_KEYWORD)
  parameters = [this, *list(signature.parameters.values())[1:]]
  vars(method)['__signature__'] = signature.replace(parameters=parameters, return_annotation='Run')
  return method


@arguments.checked
class Run:
  """A work directory and the model in one of its checkpoints, from `load`, `train` or `bring`.

  Arrays are read and programs compiled when they are first needed, and kept. A path of a run may
  also be given as a `Run`.

  Attributes:
    directory: the work directory.
    meta: the metadata of the checkpoint; `meta.lineage` has the growths.
    source: the run's name for commands, DIR@STEP.
  """

  def __init__(self, directory: paths.Path, meta: Meta):
    """Keep the checkpoint's name; its arrays are read when they are first needed."""
    self.directory, self.meta, self.source = directory, meta, f'{directory}@{meta.step}'
    self._clipped: dict[int, Run] = {}
    self._programs: dict[bool, Callable[[Params, Batch], jax.Array]] = {}
    self._scorers: dict[tuple[int | None, int | None], Scorer] = {}

  def __fspath__(self) -> str:
    return self.source

  def __repr__(self) -> str:
    model = self.config.model
    kind = 'a language model' if model.kind == 'lm' else 'an image classifier'
    return (
      f'<Run {self.source}: {kind} of {model.depth} layers × {model.width}, '
      f'{self.parameter_count:,} parameters>'
    )

  @property
  def config(self) -> Config:
    """Return the config of the run, with every size filled in."""
    return self.meta.config

  @property
  def step(self) -> int:
    """Return the number of steps that the model has made."""
    return self.meta.step

  @property
  def classes(self) -> list[str]:
    """Return the names of an image classifier's classes."""
    if self.config.model.kind == 'lm':
      raise UserError(f'{self.directory} is a language model, which has no classes')
    return [str(name) for name in self.meta.tokenizer['classes']]

  @property
  def parameters(self) -> Params:
    """Return the parameters: a nested dict of float32 arrays, [layers, …] in `blocks`."""
    return self._model.params

  @functools.cached_property
  def parameter_count(self) -> int:
    """Return the number of parameters without reading the checkpoint's arrays."""
    from tokenformer_jax.model import models

    return models.define(self.config.model).count

  @property
  def step_flops(self) -> float:
    """Return the model FLOPs of the next training step, at the size that the model has now."""
    from tokenformer_jax.model import flops

    config = self.config
    data = at_stage(config.data, stages_after(config.data, self.step)[0])
    return flops.step_flops(dataclasses.replace(config, data=data))

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """Return the tokenizer of a language model."""
    from tokenformer_jax.data import tokenizers

    self._check_is_language_model()
    return tokenizers.from_json(self.meta.tokenizer)

  # Use the model.

  def generate(
    self,
    prompt: Str | Sequence[Str] = '',
    *,
    length: Count | None = None,
    temperature: Temperature | None = None,
    top_k: Natural | None = None,
    top_p: TopP | None = None,
    seed: Seed = 0,
    stop: Annotated[Sequence[Text], REPEATED] = (),
    batch_size: Count = 8,
    max_length: Count | None = None,
    clip_positions: Count | None = None,
  ) -> str | list[str]:
    """Continue a prompt, or each of several prompts.

      run.generate('def main(', length=64, temperature=0)
      run.generate(['import ', 'class '], seed=1)

    Args:
      prompt: a text, or several; empty: a new document.
      length: the most tokens to write; default: 256, or what the prompt leaves of the length of
        training.
      temperature: divides the logits; below 1e-5 the likeliest token is taken; default: what the
        folder of the model states in generation_config.json, like the next two, or else 0.8.
      top_k: draw from the k likeliest tokens; 0: from all, the default.
      top_p: draw from the likeliest tokens that reach p together; 1: all; default: 0.95.
      seed: the seed of the draws.
      stop: a text ends before the first of these strings; the flag may be repeated.
      batch_size: the number of texts to write at a time.
      max_length: the most tokens of a prompt and its text together; default: no limit.
      clip_positions: the largest distance in full rotary attention (ReRoPE); default: the model's.

    Returns:
      The text without its prompt; for several prompts a list, in their order.

    Raises:
      UserError: the run is not a language model, or a value is not allowed.
    """
    from tokenformer_jax.decoding.texts import TextRequest

    self._check_is_language_model()
    sampling = self._choose_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    requests = [TextRequest(text, length, sampling, tuple(stop), max_length) for text in prompts]
    self._model.context_length(max_length)
    writer = self._with_clip(clip_positions)._writer
    texts = [text for text, _ in writer.write(requests, batch_size)]
    return texts[0] if isinstance(prompt, str) else texts

  def _choose_sampling(self, **given: Any) -> Sampling:
    """Return the settings of draws that are given, else those of the folder of the model."""
    from tokenformer_jax.convert import hub_generation
    from tokenformer_jax.decoding.sampling import choose

    return choose(hub_generation.stored_draws(self.meta.tokenizer), **given)

  def chat(
    self,
    messages: Annotated[Sequence[dict[str, Any]], FILLED],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    length: Count | None = None,
    temperature: Temperature | None = None,
    top_k: Natural | None = None,
    top_p: TopP | None = None,
    seed: Seed = 0,
    stop: Sequence[Text] = (),
  ) -> str:
    """Return the answer to messages, of a model that was trained on conversations.

      run.chat([{'role': 'user', 'content': 'What is 2 + 2?'}], temperature=0)

    Args:
      messages: the turns so far, with `role` and `content`; the last is not the assistant's.
      tools: schemas of the tools that the answer may call, for a template that writes them.
      chat_template_kwargs: further values that the template reads, as `{'enable_thinking': False}`.
      length: as for `generate`, like the next four.
      temperature: see there.
      top_k: see there.
      top_p: see there.
      seed: see there.
      stop: more strings that end the answer, besides the template's own end of a turn.

    Raises:
      UserError: the run was not trained on conversations, or its template refuses the messages.
    """
    from tokenformer_jax.decoding import chats as chats_lib
    from tokenformer_jax.decoding.texts import TextRequest

    template = chats_lib.find_template(self.meta, self.directory)
    sampling = self._choose_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = TextRequest('', length, sampling, tuple(stop))
    chat = chats_lib.question(messages, tools, chat_template_kwargs)
    asked = chats_lib.ask(template, chat, request)
    return self._writer.write([asked])[0][0]

  def logits(
    self, inputs: Any, *, exact: Bool = False, clip_positions: Count | None = None
  ) -> np.ndarray:
    """Return the logits of the model: for the next token, or for the classes.

      run.logits(['def main(', 'x = '])      [2, T, V]; row t predicts the text's token t
      run.logits(images)                     [B, classes]

    Args:
      inputs: for a language model a text, several texts, or token ids [B, T]. A text is read as
        the beginning of a document; ids are used unchanged. For a classifier images, uint8
        [B, S, S, C] with the size and channels of its training.
      exact: compute in float32 with products in full precision, on any device.
      clip_positions: see `generate`.

    Returns:
      float32 [B, T, V]; T is the length of the longest text, and rows after the end of a shorter
      text are NaN. For images [B, classes].

    Raises:
      UserError: the inputs have a wrong shape, or are longer than the model's positions.
    """
    import numpy as np

    from tokenformer_jax.api import inputs as inputs_lib

    run = self._with_clip(clip_positions)
    if self.config.model.kind != 'lm':
      return run._logits(inputs_lib.image_batch(inputs, run._model.config), exact)
    rows = self._rows(inputs)
    logits_BxTxV = run._logits(inputs_lib.token_batch(rows, run._model), exact)
    logits_BxTxV = logits_BxTxV[:, : max(map(len, rows))]
    for logits_TxV, ids in zip(logits_BxTxV, rows, strict=True):
      logits_TxV[len(ids) :] = np.nan
    return logits_BxTxV

  def held_out(self, count: Count, first: Natural = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return examples that the model was not trained on.

    If the run's data is not on this machine, return text of the Python standard library, or noise
    instead of images.

    Args:
      count: the number of examples, B.
      first: the number of examples to skip at the start.

    Returns:
      Inputs for `logits`, token ids [B, T] or images [B, S, S, C], and the targets: the next token
      ids [B, T], or labels [B].

    Raises:
      UserError: there are fewer examples.
    """
    from tokenformer_jax import tasks as tasks_lib

    task = tasks_lib.make(self.config)
    batch, _ = task.held_out(self.meta.tokenizer, count, first, repeat=False)
    if self.config.model.kind == 'lm':
      return batch[:, :-1], batch[:, 1:]
    return batch['images'], batch['labels']

  def evaluate(
    self,
    texts: Str | Annotated[Sequence[str], FILLED] | None = None,
    tasks: Sequence[Str] = (),
    *,
    chats: Str | Annotated[Sequence[dict[str, Any]], FILLED] | None = None,
    stride: Count | None = None,
    max_length: Count | None = None,
    clip_positions: Count | None = None,
    batch_size: Count | None = None,
    num_fewshot: Natural | None = None,
    limit: Count | None = None,
    include_path: Path | None = None,
  ) -> dict[str, float]:
    """Measure the model.

      run.evaluate()['loss']                              on the run's own validation data
      run.evaluate('files:docs/*.md')['bits_per_byte']
      run.evaluate(chats='files:held_out.jsonl')['exact']
      run.evaluate(tasks=['piqa'])['piqa/acc']

    Args:
      texts: documents, or a source of documents as in `data.source`.
      tasks: tasks of lm-evaluation-harness, which has to be installed.
      chats: conversations, as rows of the forms of docs/chat.md, or a source of them.
      stride: tokens that each window over the texts scores; default: a whole window.
      max_length: the most tokens of input; default: the training's sequence length.
      clip_positions: see `generate`.
      batch_size: rows of a batch; default: enough rows for several thousand tokens.
      num_fewshot: solved examples before each question; default: the task's own number.
      limit: samples of each task; default: all.
      include_path: a folder with tasks of your own.

    Returns:
      Figures by name: the fields of `perplexity.Figures` for texts, the figures of
      `perplexity.measure_answers` for conversations, `TASK/METRIC` and `TASK/METRIC_stderr` for
      tasks, and the figures of training for the validation data.

    Raises:
      UserError: a text or task does not exist, or the run is not a language model; or there are
        neither, and a length, a batch or a limit is given.
    """
    either = texts is not None or chats is not None or tasks
    arguments.needs_value(
      'texts, chats or tasks', either, max_length=max_length, batch_size=batch_size
    )
    arguments.needs_value('texts', texts is not None, stride=stride)
    arguments.needs_value(
      'tasks', tasks, num_fewshot=num_fewshot, limit=limit, include_path=include_path
    )
    run = self._with_clip(clip_positions)
    if not either:
      return run._validate()
    from tokenformer_jax.decoding import evaluation

    self._check_is_language_model()
    report = evaluation.evaluate(
      run._model,
      run._scorer(max_length, batch_size),
      documents=evaluation.open_documents(texts, self.config.data),
      stride=stride,
      chats=evaluation.open_chats(chats),
      tasks=evaluation.find_tasks(tasks, None if include_path is None else os.fspath(include_path)),
      num_fewshot=num_fewshot,
      limit=limit,
    )
    return evaluation.flat_figures(report)

  # Look into the model.

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
    from tokenformer_jax.inspection import model as inspect_model

    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.maps(self._model, self._rows(text)[0], layers)

  def labels(self, text: Str) -> list[str]:
    """Return the tokens of a text in the order of `maps`, with visible white space."""
    from tokenformer_jax.inspection import report as inspect_report

    return inspect_report.labels(self.tokenizer, self._rows(text)[0].tolist())

  @property
  def old_tokens(self) -> dict[int, dict[str, int]] | None:
    """Return the tokens before the last growth, by layer and kind; None if it added none."""
    from tokenformer_jax.inspection import model as inspect_model

    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.old_tokens(self._model)

  def usage(self, text: Str | None = None, tokens: Count = 32768) -> dict[int, dict[str, Usage]]:
    """Return how much each parameter token is used, by layer and kind of projection.

      run.usage()[0]['ffn'].unused      [N]

    Args:
      text: the text to measure on; None: text that the run was not trained on.
      tokens: the most tokens of the text to use.

    Raises:
      UserError: the model has neither parameter tokens nor MLPs.
    """
    from tokenformer_jax.inspection import model as inspect_model

    inspect_model.check_has_tokens(self.meta, self.directory)
    return inspect_model.measure_text(self._model, text, tokens)

  def plot_maps(self, text: Str, layers: Layers | None = None) -> Figure:
    """Draw `maps` with a panel for each layer and kind, and a line between old and new tokens."""
    from tokenformer_jax.inspection import heat_map

    heat_map.check()
    return heat_map.draw(self.maps(text, layers), self.labels(text), self.old_tokens)

  def plot(
    self,
    y: Str = 'train/loss',
    x: XAxis = 'steps',
    *,
    beside: Sequence[Run | Path] = (),
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
    from tokenformer_jax.runs import curves

    return curves.draw([str(self.directory), *_directories(beside)], x, y)

  def report(self, *, beside: Sequence[Run | Path] = (), models: Natural = MODELS) -> Page:
    """Return a page about this run and others: what the command `report` writes.

      run.report()                                      shown inline at the end of a notebook's cell
      large.report(beside=[small, medium]).write('growth.html')

    Args:
      beside: other runs, which come before this one on the page.
      models: look into the models of at most so many runs, the last ones, this one first of all.

    Raises:
      UserError: plotly is not installed, or a run has no figures.
    """
    from tokenformer_jax.decoding import trained
    from tokenformer_jax.report import page

    def load(source: str) -> Trained:
      return self._model if source == self.source else trained.load(source)

    return page.build([*_directories(beside), str(self.directory)], models=models, load=load)

  def metrics(self) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl: `step`, and figures such as `train/loss`.

    Raises:
      UserError: the run has no metrics, for example because it was converted.
    """
    from tokenformer_jax.runs import curves

    return curves.read(self.directory)

  # Make other runs from this one.

  grow = _method(actions.grow)
  merge = _method(actions.merge)
  extract = _method(actions.extract)
  remove = _method(actions.remove)
  slice = _method(actions.slice)
  shrink = _method(actions.shrink)
  scale = _method(actions.scale)
  freeze = _method(actions.freeze)
  as_tokens = _method(actions.as_tokens)
  untie = _method(actions.untie)

  def group_table(self) -> str:
    """Return a table of the groups of parameter tokens and of where they come from."""
    from tokenformer_jax.grow.derivation import Parent

    return actions.group_table(Parent(self.source))

  def train(
    self, steps: Count | None = None, *, workdir: Path | None = None, **changes: Any
  ) -> Run:
    """Continue the training, here or in another work directory.

      run.train(700, optim={'learning_rate': 1e-3})
      run.train(60, workdir='runs/tuned', data={'source': 'files:corpus'}, grow={'step': 'restart'})

    Args:
      steps: the step to train to; None: the config's steps.
      workdir: None: continue this run from its newest checkpoint. Another directory: begin a run
        there from this checkpoint, grown if `changes` ask for more parameter tokens.
      **changes: new values, by section of keys: `optim={'old_tokens': 'freeze'}`.

    Returns:
      The run at its last step.

    Raises:
      UserError: a value is not allowed, or this checkpoint is not the newest of the run.
    """
    from tokenformer_jax.training import loop

    config, length = self.config, {} if steps is None else {'train': {'steps': steps}}
    if workdir is None:
      if (newest := load(self.directory).step) != self.step:
        raise UserError(
          f'{self.source} is not the newest checkpoint of the run, which has step {newest}; '
          'name another workdir to begin a run from it'
        )
      workdir = self.directory
    else:
      model = config.model
      if isinstance(model, ViTConfig):  # The new run takes the number of classes from its images.
        model = dataclasses.replace(model, classes=0)
      config = dataclasses.replace(config, init_from=self.source, grow=GrowConfig(), model=model)
    loop.train(config_lib.resolve(changes, length, base=config), workdir)
    return load(workdir)

  # Give the model to others.

  def to_hf(
    self,
    target: Path,
    *,
    dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32',
    allow_nonfinite: Bool = False,
  ) -> None:
    """Write a folder that `transformers` loads: weights, config, tokenizer and a model card.

      run.to_hf('folder')

    A model that is exactly of a family of the hub goes out as such. Another one has two PyTorch
    files that compute it, for `trust_remote_code=True`.

    Args:
      target: the new folder.
      dtype: of the written tensors, float32, float16 or bfloat16.
      allow_nonfinite: accept weights that are NaN or infinite.

    Raises:
      UserError: the target exists, the run is not a language model, or the PyTorch files do not
        have a part of its model. Nothing is written then.
    """
    from tokenformer_jax.convert import export
    from tokenformer_jax.storage import paths

    export.to_hf(self.source, paths.local(target), dtype=dtype, allow_nonfinite=allow_nonfinite)

  def to_peft(
    self,
    target: Path,
    base: Path,
    *,
    groups: Sequence[Count] | None = None,
    allow_nonfinite: Bool = False,
  ) -> None:
    """Write groups of parameter tokens that are LoRA as an adapter that `peft` loads.

      run.to_peft('adapter', 'llama')

    The base with the adapter computes what the run does. Groups are LoRA if their score is
    `linear`, and they are beside matrices.

    Args:
      target: the new folder.
      base: the folder, or ORG/NAME of the hub, that the run was brought from; its tensors must be
        those of the run.
      groups: the groups, as 2,3, counted from 1; default: all.
      allow_nonfinite: accept weights that are NaN or infinite.

    Raises:
      UserError: the target exists, a group is not LoRA, or the run is not the base with such
        groups. Nothing is written then.
    """
    from tokenformer_jax.convert import peft
    from tokenformer_jax.storage import paths

    numbers = actions.group_numbers(self.config.model, groups) if groups is not None else ()
    where = (self.source, paths.local(target), os.fspath(base))
    peft.to_peft(*where, numbers, allow_nonfinite=allow_nonfinite)

  # Load and keep what the methods need.

  def _check_is_language_model(self) -> None:
    from tokenformer_jax.runs import checkpoint

    checkpoint.check_is_language_model(self.meta, self.directory)

  def _rows(self, inputs: Any) -> list[np.ndarray]:
    """Return the token ids of a text, or of several."""
    from tokenformer_jax.api import inputs as inputs_lib

    self._check_is_language_model()
    return inputs_lib.rows_of_ids(inputs, self.tokenizer, self.meta.config.model.vocab_size)

  @functools.cached_property
  def _model(self) -> Trained:
    """Return the model on all devices."""
    from tokenformer_jax.decoding import trained
    from tokenformer_jax.runs import checkpoint

    return trained.load(self.source, check=checkpoint.check_is_model)

  @functools.cached_property
  def _writer(self) -> Writer:
    """Return the model's writer of texts."""
    from tokenformer_jax.decoding.writer import Writer

    return Writer.from_trained(self._model)

  def _with_clip(self, clip: int | None) -> Run:
    """Return the same parameters with `positions.clip` (see `length.with_clip`); None: this."""
    if clip is None:
      return self
    if clip not in self._clipped:
      clipped = Run(self.directory, self.meta)
      clipped._model = self._model.with_clip(clip)
      self._clipped[clip] = clipped
    return self._clipped[clip]

  def _scorer(self, max_length: int | None, batch_size: int | None) -> Scorer:
    """Return the scorer of rows: see `evaluation.make_scorer`."""
    from tokenformer_jax.decoding import evaluation

    key = (max_length, batch_size)
    if key not in self._scorers:
      self._scorers[key] = evaluation.make_scorer(self._model, max_length, batch_size)
    return self._scorers[key]

  def _logits(self, batch: Batch, exact: bool) -> np.ndarray:
    """Return the logits of a batch of the task.

    Args:
      batch: arrays with the leading axis B, of any length.
      exact: whether to compute in float32 with products in full precision.
    """
    import jax
    import numpy as np

    from tokenformer_jax.decoding import buckets
    from tokenformer_jax.parallel import sharding

    mesh, count = self._model.mesh, len(jax.tree.leaves(batch)[0])
    if exact not in self._programs:
      task = self._task(exact)
      self._programs[exact] = jax.jit(
        lambda params, batch: task.logits(params, batch)[0],
        out_shardings=sharding.replicated(mesh),
      )
    precision = jax.default_matmul_precision('highest' if exact else None)
    with jax.set_mesh(mesh), precision:
      rows = buckets.rows(count)
      padded = jax.tree.map(
        lambda a: np.concatenate([a, np.zeros((rows - count, *a.shape[1:]), a.dtype)]), batch
      )
      sharded = jax.device_put(padded, sharding.batch_sharding(mesh))
      logits = self._programs[exact](self._model.params, sharded)
    return np.array(logits[:count], np.float32)

  def _task(self, exact: bool = False) -> Task:
    from tokenformer_jax import tasks as tasks_lib
    from tokenformer_jax.grow import verify

    config = self._model.config
    if exact:
      return verify.exact_task(config, config.model)
    # The training's attention kernel may be for another kind of device.
    train = dataclasses.replace(config.train, attention='auto', remat='auto')
    return tasks_lib.make(dataclasses.replace(config, train=train))

  def _validate(self) -> dict[str, float]:
    """Return the figures of the run's own validation data."""
    import jax

    from tokenformer_jax.tasks import validation

    task, eval_step = self._validation
    mesh = self._model.mesh
    rows = range(task.config.data.batch_size)
    with jax.set_mesh(mesh):
      return validation.figures(task, eval_step, {'': self._model.params}, rows, mesh)

  @functools.cached_property
  def _validation(self) -> tuple[Task, Callable[[Params, Batch], Any]]:
    """Return the task with its data open, and its compiled evaluation step."""
    import jax

    from tokenformer_jax import tasks as tasks_lib
    from tokenformer_jax.decoding import buckets
    from tokenformer_jax.resolve.teacher import Teacher
    from tokenformer_jax.runs import checkpoint
    from tokenformer_jax.steps import step as step_lib
    from tokenformer_jax.steps.last_growth import frozen_base, last_growth

    model = self._model
    config = self._task().config
    with jax.set_mesh(model.mesh):
      rows = buckets.rows(config.data.batch_size)
    data = dataclasses.replace(config.data, batch_size=rows)
    config = dataclasses.replace(config, data=data)
    before = frozen_base(last_growth(model.meta.lineage, config.model), config)
    record = model.meta.teacher if data.has_pairs else None
    teacher = record and Teacher(record, checkpoint.open_source(record.source))
    task = tasks_lib.make(
      config, model.meta.tokenizer, teacher and teacher.meta.config.model, before
    )
    task.prepare()
    step = step_lib.make_eval_step(task, model.mesh)
    fixed = [teacher.read(model.mesh)] if teacher else []
    return task, lambda params, batch: step(params, batch, *fixed)


def _directories(runs: Sequence[Run | Path]) -> list[str]:
  """Return the work directories of runs."""
  return [str(one.directory if isinstance(one, Run) else one) for one in runs]
