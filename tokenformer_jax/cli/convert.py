r"""Turn released TokenFormer weights or a popular model into a run of ours, and back.

  tokenformer convert to-jax --source=WEIGHTS --target=RUN
  tokenformer convert to-torch --source=RUN[@STEP] --target=FOLDER
  tokenformer convert to-hf --source=RUN[@STEP] --target=FOLDER
  tokenformer convert to-peft --source=RUN[@STEP] --target=FOLDER --base=FOLDER

`tokenformer convert ACTION --help` lists the flags of an action.

The source of to-jax is a .bin or .safetensors file, the .index.json of a sharded set, a directory
with one of them, or a folder in the layout of transformers, whose config.json says what its model
computes: docs/transformers.md lists the families. ORG/NAME or ORG/NAME@REVISION fetches such a
folder from the hub. PyTorch reads .bin files. You can generate from
the new work directory, grow it, train on and evaluate it. It holds parameters only; the optimizer's
moments start at zero. --dtype=bfloat16 stores them in half the space, and every command reads them
as float32.

to-torch writes a folder with the tensors that the released code reads, in model.safetensors, and
the tokenizer. to-jax takes that folder back.

Released weights do not record the score function, the number of heads, or the rotated part of each
head. The command prints its assumptions about them; flags change them.

to-hf writes a language model as a folder that transformers loads, with the PyTorch files that
compute it. to-jax takes that folder back.

to-peft writes groups of parameter tokens with the score linear as a LoRA adapter of PEFT, for the
base that the run was brought from. to-jax --adapters takes adapters back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from absl import flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.api.run import Run, bring, load
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import ModelConfig, PattentionConfig, RotaryConfig, SoftmaxConfig
from tokenformer_jax.config.arguments import Path, Text
from tokenformer_jax.config.section import Bool
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages


def to_torch(
  source: str,
  target: Path,
  *,
  dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32',
  allow_nonfinite: Bool = False,
) -> ModelConfig:
  """Write a folder with the tensors of a released checkpoint and the tokenizer; return the model.

  It is the exact inverse of `to_jax`: weights that came from `dtype` return to it bit for bit.

  Args:
    source: The run, DIR or DIR@STEP.
    target: The new folder.
    dtype: Of the written tensors.
    allow_nonfinite: Accept weights that are NaN or infinite.
  """
  from tokenformer_jax.convert import export
  from tokenformer_jax.storage import paths

  return export.to_torch(source, paths.local(target), dtype=dtype, allow_nonfinite=allow_nonfinite)


_ACTIONS = signatures.Actions(
  {'to-jax': bring, 'to-torch': to_torch, 'to-hf': Run.to_hf, 'to-peft': Run.to_peft},
  without=['source', 'target'],
)


def _both(source: Text, target: Text) -> tuple[str, str]:
  """Return the arguments of every action.

  Args:
    source: Weights or ORG/NAME of the hub (to-jax), or a run, DIR or DIR@STEP.
    target: The new work directory or folder.
  """
  return source, target


def define_flags(argv: Sequence[str]) -> str:
  """Define the flags of the action that the first word names; return its description."""
  if not argv[1:] or argv[1].startswith('-'):  # `main` asks for the word.
    for name in ('source', 'target'):
      flags.DEFINE_string(name, None, '')
    return __doc__ or ''
  name = _ACTIONS.name(argv)
  signatures.define(_both)
  _ACTIONS.define(name)
  text = signatures.description(_ACTIONS.functions[name])
  return f'{text}\n\n  tokenformer convert {name} --source=… --target=…'


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  import jax

  from tokenformer_jax.convert import hub, hub_download, hub_folder
  from tokenformer_jax.storage import paths

  # Leave accelerators alone: nothing is computed, and other processes may hold them.
  jax.config.update('jax_platforms', 'cpu')
  if not argv[1:]:
    raise UserError(
      f'convert needs a word that says what to do: {" or ".join(_ACTIONS.functions)}; for example '
      '`tokenformer convert to-jax --source=WEIGHTS --target=DIR`'
    )
  action, options = _ACTIONS.name(argv), _ACTIONS.given(argv)
  source, target = _both(**signatures.given(_both))
  if action == 'to-torch':
    model = to_torch(source, target, **options)
    _say_sizes(model)
    messages.say(f'wrote {target}')
    _say_lost(model)
  elif action == 'to-hf':
    loaded = load(source)
    loaded.to_hf(target, **options)
    _say_sizes(loaded.config.model)
    messages.say(f'wrote {target}; to load it with transformers:')
    has_code = paths.local(target).joinpath(hub_folder.CODE[0]).is_file()
    trust = ', trust_remote_code=True' if has_code else ''
    print(f'AutoModelForCausalLM.from_pretrained({str(target)!r}{trust})')
  elif action == 'to-peft':
    load(source).to_peft(target, **options)
    messages.say(f'wrote {target}; to load it with transformers and peft:')
    base = f'AutoModelForCausalLM.from_pretrained({str(options["base"])!r})'
    print(f'PeftModel.from_pretrained({base}, {str(target)!r})')
  else:
    weights = hub_download.find(source, str(options.get('tokenizer', '')))
    model = bring(weights, target, **options).config.model
    _say_sizes(model)
    if not hub.is_folder(weights):
      _say_assumed(model, options)
    messages.say(f'wrote {target}; to try it:')
    print(f"tokenformer generate --source={target} --prompt='Once upon a time'")


def _say_sizes(model: ModelConfig) -> None:
  """Print the sizes of a model."""
  from tokenformer_jax.model.lm import define_lm

  heads, count = ', '.join(map(str, model.heads)), define_lm(model).count
  messages.say(f'{model.depth} layers, width {model.width}, {heads} heads, {count:,} parameters')


def _unrecorded(model: ModelConfig) -> dict[str, Any]:
  """Return what released weights do not record about their model."""
  mixer, ffn = model.layer.mixer, model.layer.ffn
  assert isinstance(mixer, SoftmaxConfig) and isinstance(ffn, PattentionConfig)
  rotary = mixer.positions
  fraction = rotary.fraction if isinstance(rotary, RotaryConfig) else 0.0
  return {'heads': mixer.heads, 'score': ffn.score.kind, 'rotary_fraction': fraction}


def _say_lost(model: ModelConfig) -> None:
  """Print what the released code needs to compute a model, and what it cannot."""
  from tokenformer_jax.convert import released_torch

  if (score := _unrecorded(model)['score']) != released_torch.SCORE:
    messages.say(
      f'the file does not record the score {score}: set norm_activation_type to it in the config '
      f'of the released code, where the released models have {released_torch.SCORE}'
    )
  projections = config_lib.pattentions(model)
  references = {name: projection.reference for name, projection in projections.items()}
  if references != config_lib.token_counts(model):
    messages.say(
      'the released code takes the scale from the number of tokens, so it will not compute what '
      f'this model does, whose reference counts are {config_lib.counts_as_text(references)}; a '
      'model grown with --scale=resize (as --method=duplicate is) computes the same there'
    )


def _say_assumed(model: ModelConfig, given: Mapping[str, Any]) -> None:
  """Print the assumptions about the model, as the flags that change them."""
  unrecorded = _unrecorded(model)
  assumed = [f'--{name}={value}' for name, value in unrecorded.items() if name not in given]
  if assumed:
    messages.say(
      f'assumed as in the released models, because weights do not record it: {", ".join(assumed)}'
    )


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.run(main, positional=True, on_all_hosts=False, define=define_flags)
