r"""Turn released TokenFormer weights or a popular model into a run of ours, and back.

  tokenformer convert to-jax --source=pytorch_model.bin --target=RUN
      [--tokenizer=tokenizer.json|bytes|RUN] [--heads=N] [--rotary_fraction=F] [--sequence_length=N]
      [--score=l2_norm_gelu|gelu_l2_norm|softmax] [--dtype=float32|bfloat16] [--allow_nonfinite]
  tokenformer convert to-jax --source=CHECKPOINT --target=RUN [--zoom_dim=N] …
  tokenformer convert to-jax --source=FOLDER --target=RUN
      [--tokenizer=…] [--sequence_length=N] [--dtype=float32|bfloat16] [--allow_nonfinite]
  tokenformer convert to-torch --source=RUN[@STEP] --target=model.safetensors
      [--dtype=float32|float16|bfloat16] [--allow_nonfinite]
  tokenformer convert to-hf --source=RUN[@STEP] --target=FOLDER
      [--dtype=float32|float16|bfloat16] [--allow_nonfinite]
  tokenformer convert layout --source=RUN[@STEP] --target=RUN
      --layout=half_split|interleaved

The source of to-jax is a .bin or .safetensors file, the .index.json of a sharded set, a directory
with one of them, an Orbax checkpoint of the released TPU code, or a folder in the layout of
transformers, whose config.json says what its model computes: docs/transformers.md lists the
families. You can generate from the new work directory, grow it, train on and evaluate it. It holds
parameters only; the optimizer's moments start at zero. --dtype=bfloat16 stores them in half the
space, and every command reads them as float32.

to-torch writes a safetensors file, which safetensors.torch.load_file reads, and the tokenizer to a
tokenizer.json beside it, where to-jax looks for one.

Released weights do not record the score function, the number of heads, or the rotated part of each
head. The command prints its assumptions about them; flags change them.

to-hf writes a language model as a folder that transformers loads, with the PyTorch files that
compute it. to-jax takes that folder back.

layout writes a run that computes the same with the other rotary layout, and continues at the step
of the source.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.cli import flag_uses, help_text, parse_flags
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.flag_uses import Use
from tokenformer_jax.config import Config, DataConfig, ModelConfig, RotaryConfig
from tokenformer_jax.convert import (
  hub,
  hub_folder,
  hub_generation,
  released_torch,
  released_tpu,
  rotary_layout,
  run_tensors,
  tensor_files,
  to_hf,
  vocabulary,
)
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import files
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

_SCORE = released_torch.SCORE
_STORED = ('float32', 'bfloat16')  # dtypes of a run's parameters

# The flags that have an effect in each action.
_USES = {
  'to-jax': (
    Use('heads rotary_fraction score zoom_dim tokenizer sequence_length dtype allow_nonfinite'),
  ),
  'to-torch': (Use('dtype allow_nonfinite'),),
  'to-hf': (Use('dtype allow_nonfinite'),),
  'layout': (Use('layout'),),
}


def to_jax(
  source: Path,
  target: paths.Path,
  *,
  tokenizer: str = '',
  heads: int | None = None,
  rotary_fraction: float | None = None,
  score: str = _SCORE,
  zoom_dim: int | None = None,
  sequence_length: int | None = None,
  dtype: str = 'float32',
  allow_nonfinite: bool = False,
) -> Config:
  """Make a work directory, with a checkpoint of step 0, from weights; return its config.

  The source is a path for `tensor_files.find`, an Orbax checkpoint (`released_tpu`), which has no
  `rotary_fraction`, or a folder in the hub's layout (`hub`), which has no `score` or `heads`
  either; only an Orbax checkpoint has a `zoom_dim`. `infer_model` of `released_torch` and
  `released_tpu` explains these; `vocabulary.find` explains `tokenizer`. The model does not depend
  on `sequence_length`, by default 2048 or the fewer positions of a folder. `dtype` is float32 or
  bfloat16, in which the arrays are stored; whoever reads them widens them. `allow_nonfinite`
  accepts weights that are NaN or infinite, with a message.

  Raises:
    UserError: `tensor_files.find` or `infer_model` refuses the source, a weight is not finite, the
      tokenizer does not fit, or the target exists or cannot be written. Nothing of the target
      remains then.
  """
  if dtype not in _STORED:
    raise UserError(f'--dtype is {dtype}; a run stores its parameters as {" or ".join(_STORED)}')
  files.check_target(target)
  if is_folder := hub.is_folder(source):
    given = {
      'heads': heads,
      'rotary_fraction': rotary_fraction,
      'zoom_dim': zoom_dim,
      'score': None if score == _SCORE else score,
    }
    model, weights = _find_folder(source, given)
  else:
    model, weights = _find(source, heads, rotary_fraction, score, zoom_dim)
  spec, loaded = vocabulary.find(tokenizer, source)
  if loaded.size > model.vocab_size:
    raise UserError(
      f'the tokenizer {spec} has {loaded.size} token ids, and the embedding {model.vocab_size} '
      'rows; name the tokenizer of this model by --tokenizer'
    )
  most = model.max_length if is_folder else 2048
  sequence_length = sequence_length or min(2048, most)
  if not is_folder:
    model = dataclasses.replace(model, max_length=sequence_length)
  config = Config(
    model=model,
    data=DataConfig(tokenizer=spec, sequence_length=sequence_length),
  )
  config_lib.resolve(config_lib.to_config_dict(config))
  found = run_tensors.NonFinite(str(source), allow_nonfinite)
  for name, numbers in weights.numbers():
    found.count(name, numbers)
  found.report()
  if dtype != 'float32' and (rounded := sorted(weights.dtypes - {dtype})):
    messages.say(f'numbers of {" and ".join(rounded)} are rounded to {dtype}')
  state = {'params': weights.make_params(dtype)}
  stored = _of_folder(loaded, source, config) if is_folder else loaded.to_json()
  files.write(target, state, config, stored, lineage=(), contents='params', step=0)
  return config


class _Weights(NamedTuple):
  """Weights that were found but not read."""

  dtypes: set[str]  # of the tensors
  # Returns the parameters to store in a dtype. The leaves are `checkpoint.Deferred`.
  make_params: Callable[[str], Params]
  numbers: Callable[[], Iterator[tuple[str, np.ndarray]]]  # in chunks, with the tensor's name


def _of_folder(loaded: Tokenizer, source: Path, config: Config) -> dict[str, Any]:
  """Return the tokenizer of a folder's model to store: with its template, and how texts end."""
  generation = hub_generation.find(source, config.model.vocab_size)
  if generation.unread:
    messages.say(f'left out of {hub_generation.FILE}: {", ".join(generation.unread)}')
  stored = loaded.of_folder(generation.ends).to_json()
  if chat := vocabulary.find_chat(config.data):
    stored['chat'] = chat
  return stored


def _find_folder(source: Path, given: Mapping[str, Any]) -> tuple[ModelConfig, _Weights]:
  """Return the model of a folder in the hub's layout, and its weights."""
  for name, value in given.items():
    if value is not None:
      raise UserError(
        f'--{name} has no meaning for {source}, whose config.json says it; leave it out'
      )
  if model := hub_folder.find_model(source):
    tensors = tensor_files.find(source)
    hub_folder.check_fit(model, tensors, source)
    return model, _of_tensors(tensors, functools.partial(hub_folder.deferred, model, tensors))
  folder = hub.find(source)
  messages.say(
    f'{source} is a {folder.family.architecture}'
    + (f'; not read, because not known: {", ".join(folder.unread)}' if folder.unread else '')
  )
  make_params = functools.partial(hub.deferred, folder)
  return folder.model, _of_tensors(folder.tensors, make_params)


def _find(
  source: Path,
  heads: int | None,
  rotary_fraction: float | None,
  score: str,
  zoom_dim: int | None,
) -> tuple[ModelConfig, _Weights]:
  """Return the model of a source, and its weights."""
  if directory := released_tpu.find_directory(source):
    if rotary_fraction is not None:
      raise UserError(
        f'--rotary_fraction has no meaning for {source}, a checkpoint of the released TPU code, '
        'whose models have no positions; leave it out'
      )
    arrays = released_tpu.find(directory)
    model = released_tpu.infer_model(arrays, heads=heads, zoom_dim=zoom_dim or 0, score=score)
    return model, _Weights(
      {'float32'},
      functools.partial(released_tpu.deferred, model, arrays),
      lambda: ((name, array.read()) for name, array in arrays.items()),
    )
  if zoom_dim is not None:
    raise UserError(
      f'--zoom_dim has no meaning for {source}, which is not a checkpoint of the released TPU '
      'code; leave it out'
    )
  tensors = tensor_files.find(source)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  model = released_torch.infer_model(
    shapes, heads=heads, rotary_fraction=rotary_fraction, score=score
  )
  return model, _of_tensors(tensors, functools.partial(released_torch.deferred, model, tensors))


def _of_tensors(
  tensors: Mapping[str, tensor_files.Tensor], make_params: Callable[[str], Params]
) -> _Weights:
  """Return weights that are the tensors of files."""
  dtypes = {tensor.dtype.name for tensor in tensors.values()}
  return _Weights(dtypes, make_params, lambda: _chunks(tensors))


def _chunks(tensors: Mapping[str, tensor_files.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the numbers of tensors in chunks, with the tensor's name."""
  for name, tensor in tensors.items():
    for chunk in tensor.chunks():
      yield name, chunk


def to_torch(
  source: str, target: Path, *, dtype: str = 'float32', allow_nonfinite: bool = False
) -> ModelConfig:
  """Write the parameters of a run as a safetensors file of the released model; return its model.

  This is the exact inverse of `to_jax`: weights that came from `dtype` return to it bit for bit.
  The tokenizer of the run becomes a `tokenizer.json` in the same directory
  (`vocabulary.written_beside`).

  Raises:
    UserError: the target does not end in `.safetensors`, exists or cannot be written, the run
      cannot be read, the released code cannot compute its model, a weight is not finite, or another
      tokenizer is beside the target. Nothing of the target remains then.
  """
  files.check_target(target, what='file')
  if target.suffix != '.safetensors':
    raise UserError(f'the target {target} must end in .safetensors, the only format written')
  directory, step = paths.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
    model = meta.config.model
    released_torch.check_can_compute(model)
    vocabulary.check_beside(target, meta.tokenizer)
    places = released_torch.layout(model)
    shapes = {name: place.shape for name, place in places.items()}
    found = run_tensors.NonFinite(source, allow_nonfinite)
    stream = found.counted(run_tensors.read(checkpoints, meta, places))
    with files.alone(target), vocabulary.written_beside(target, meta.tokenizer):
      tensor_files.write(target, dtype, shapes, stream)
  return model


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('source', None, 'Weights (to-jax) or a run (to-torch, to-hf, layout).')
  flags.DEFINE_string('target', None, 'The new work directory, file or folder.')
  flags.DEFINE_integer(
    'heads', None, 'Attention heads. Default: by the width, as released.', lower_bound=1
  )
  flags.DEFINE_float(
    'rotary_fraction', None, 'The rotated part of each head. Default: 0.25, as released.'
  )
  flags.DEFINE_enum(
    'score',
    _SCORE,
    released_torch.SCORES,
    'The score function, which weights do not record: norm_activation_type, or normalize_type of '
    'the TPU code, in the config of the training.',
  )
  flags.DEFINE_integer(
    'zoom_dim', None, 'The zoom_dim in the config of a TPU checkpoint.', lower_bound=0
  )
  flags.DEFINE_string(
    'tokenizer',
    '',
    'A tokenizer.json, bytes, or the run (DIR or DIR@STEP) whose tokenizer to take. Default: the '
    'tokenizer.json beside the source.',
  )
  flags.DEFINE_integer(
    'sequence_length',
    None,
    'For later training. Default: 2048, or the fewer positions of a folder.',
    lower_bound=1,
  )
  flags.DEFINE_bool('allow_nonfinite', False, 'Accept weights that are NaN or infinite.')
  flags.DEFINE_enum('dtype', 'float32', tensor_files.DTYPES, 'The dtype of what is written.')
  flags.DEFINE_enum('layout', None, rotary_layout.LAYOUTS, 'The rotary layout to change to.')
  flag_uses.declare(_USES)


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  # Leave accelerators alone: nothing is computed, and other processes may hold them.
  jax.config.update('jax_platforms', 'cpu')
  action, *rest = argv[1:] or ['']
  if not action:
    raise UserError(
      f'convert needs a word that says what to do: {" or ".join(_USES)}; for example `tokenformer '
      'convert to-jax --source=WEIGHTS --target=DIR`'
    )
  if action not in _USES or rest:
    wrong = rest[0] if action in _USES else action
    raise UserError(f'unknown command {wrong!r}{nearest(wrong, _USES)}')
  values = flags.FLAGS
  for name in ('source', 'target'):
    if not values[name].value:
      raise UserError(parse_flags.missing_flag(name))
  options = {name: values[name].value for use in _USES[action] for name in use.flags.split()}
  is_local = action in ('to-torch', 'to-hf')
  target = paths.local(values.target) if is_local else paths.parse_path(values.target)
  if action == 'layout':
    _change_layout(values.source, target, values.layout)
    return
  if action == 'to-hf':
    _say_sizes(to_hf.convert_run(values.source, target, **options))
    messages.say(f'wrote {target}; to load it with transformers:')
    trust = ', trust_remote_code=True' if (target / hub_folder.CODE[0]).is_file() else ''
    print(f'AutoModelForCausalLM.from_pretrained({str(target)!r}{trust})')
    return
  if action == 'to-jax':
    source = paths.local(values.source)
    model = to_jax(source, target, **options).model
    if hub.is_folder(source):
      _say_sizes(model)
      _say_written(target, hub_generation.find(source, model.vocab_size).flags)
      return
  else:
    model = to_torch(values.source, target, **options)
  mixer, score = model.layer.mixer, model.layer.ffn.score.kind
  rotary = mixer.positions
  rotated = rotary.fraction if isinstance(rotary, RotaryConfig) else 0
  counts, references = (
    {name: getattr(config, size) for name, config in config_lib.pattentions(model).items()}
    for size in ('tokens', 'reference')
  )
  messages.say(
    f'{model.depth} layers, width {model.width}, {mixer.heads} heads, rotated part {rotated:g} of '
    f'each, parameter tokens {config_lib.counts_as_text(counts)}, score {score}'
  )
  if action == 'to-jax':
    _say_assumed(model)
    _say_written(target)
    return
  messages.say(f'wrote {target}')
  if score != _SCORE:
    messages.say(
      f'the file does not record the score {score}: set norm_activation_type to it in the config '
      f'of the released code, where the released models have {_SCORE}'
    )
  if references != counts:
    messages.say(
      'the released code takes the scale from the number of tokens, so it will not compute what '
      f'this model does, whose reference counts are {config_lib.counts_as_text(references)}; a '
      'model grown with --scale=resize (as --method=duplicate is) computes the same there'
    )


def _say_sizes(model: ModelConfig) -> None:
  """Print the sizes of a model of a folder."""
  heads, count = ', '.join(map(str, model.heads)), hub_folder.count(model)
  messages.say(f'{model.depth} layers, width {model.width}, {heads} heads, {count:,} parameters')


def _change_layout(source: str, target: paths.Path, layout: str | None) -> None:
  if layout is None:
    raise UserError(f'--layout is missing; it must be one of {", ".join(rotary_layout.LAYOUTS)}')
  rotary_layout.convert_run(source, target, layout)
  messages.say(f'the model computes the same as that of {source}, with the rotary layout {layout}')
  _say_written(target)


def _say_written(target: paths.Path, draws: Mapping[str, float] = MappingProxyType({})) -> None:
  """Print that a run was written, and a command that tries it; `draws` are flags of it."""
  messages.say(f'wrote {target}; to try it:')
  command = help_text.spell_command('generate')
  given = ''.join(f' --{name}={value:g}' for name, value in draws.items())
  print(f"{command} --source={target} --prompt='Once upon a time'{given}")


def _say_assumed(model: ModelConfig) -> None:
  """Print the assumptions about the model, as the flags that change them."""
  named = {'heads': model.layer.mixer.heads, 'score': model.layer.ffn.score.kind}
  if isinstance(rotary := model.layer.mixer.positions, RotaryConfig):
    named['rotary_fraction'] = rotary.fraction
  assumed = [f'--{name}={value}' for name, value in named.items() if not flags.FLAGS[name].present]
  if assumed:
    messages.say(
      f'assumed as in the released models, because weights do not record it: {", ".join(assumed)}'
    )


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True, on_all_hosts=False)
