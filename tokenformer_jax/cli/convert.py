r"""Turn released TokenFormer weights or a popular model into a run of ours, and back.

  tokenformer convert to-jax --source=WEIGHTS --target=RUN
  tokenformer convert to-torch --source=RUN[@STEP] --target=FOLDER
  tokenformer convert to-hf --source=RUN[@STEP] --target=FOLDER

`tokenformer convert ACTION --help` lists the flags of an action.

The source of to-jax is a .bin or .safetensors file, the .index.json of a sharded set, a directory
with one of them, or a folder in the layout of transformers, whose config.json says what its model
computes: docs/transformers.md lists the families. PyTorch reads .bin files. You can generate from
the new work directory, grow it, train on and evaluate it. It holds parameters only; the optimizer's
moments start at zero. --dtype=bfloat16 stores them in half the space, and every command reads them
as float32.

to-torch writes a folder with the tensors that the released code reads, in model.safetensors, and
the tokenizer. to-jax takes that folder back.

Released weights do not record the score function, the number of heads, or the rotated part of each
head. The command prints its assumptions about them; flags change them.

to-hf writes a language model as a folder that transformers loads, with the PyTorch files that
compute it. to-jax takes that folder back.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
from absl import flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.api.run import Run, bring
from tokenformer_jax.cli import help_text, signatures
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import ModelConfig, RotaryConfig
from tokenformer_jax.convert import (
  export,
  hub,
  hub_folder,
  hub_generation,
  released_torch,
)
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths

_SCORE = released_torch.SCORE


_ACTIONS = signatures.Actions(
  {'to-jax': bring, 'to-torch': export.to_torch, 'to-hf': Run.to_hf},
  without=['source', 'target'],
)


def define_flags(argv: Sequence[str]) -> str:
  """Define the flags of the action that the first word names; return its description."""
  named = bool(argv[1:]) and not argv[1].startswith('-')
  flags.DEFINE_string('source', None, 'Weights (to-jax) or a run, DIR or DIR@STEP.', required=named)
  flags.DEFINE_string('target', None, 'The new work directory or folder.', required=named)
  if not named:
    return __doc__ or ''
  name = _ACTIONS.name(argv)
  _ACTIONS.define(name)
  text = signatures.description(_ACTIONS.functions[name])
  return f'{text}\n\n  tokenformer convert {name} --source=… --target=…'


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  # Leave accelerators alone: nothing is computed, and other processes may hold them.
  jax.config.update('jax_platforms', 'cpu')
  if not argv[1:]:
    raise UserError(
      f'convert needs a word that says what to do: {" or ".join(_ACTIONS.functions)}; for example '
      '`tokenformer convert to-jax --source=WEIGHTS --target=DIR`'
    )
  values, action, options = flags.FLAGS, _ACTIONS.name(argv), _ACTIONS.given(argv)
  is_local = action in ('to-torch', 'to-hf')
  target = paths.local(values.target) if is_local else paths.parse_path(values.target)
  if action == 'to-hf':
    _say_sizes(export.to_hf(values.source, target, **options))
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
    model = export.to_torch(values.source, target, **options)
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
  heads, count = ', '.join(map(str, model.heads)), define_lm(model).count
  messages.say(f'{model.depth} layers, width {model.width}, {heads} heads, {count:,} parameters')


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
  cli.run(main, positional=True, on_all_hosts=False, define=define_flags)
