"""Write the runs of `format_N/`, where N is today's format of checkpoints.

    PYTHONPATH=tests:tests/support python -m stored_runs.write

Each run is a work directory as training left it, `NAME/run.tar.xz`, and the values that it must
reproduce, `NAME/expected.json`: the losses of the steps after its checkpoint, some logits, its
history. A format's runs are written once and then stay as they are: they show that later code
reads what earlier code of the same format wrote. A new format gets new runs.

  trained    a TokenFormer on text (bpe), after 8 of 12 steps, with the optimizer's moments
  grown      `trained` with another group of tokens, after 10 of 12 steps
  frozen     `grown` with more tokens by zero keys, its old tokens frozen, after 11 of 14 steps
  converted  released weights, converted: parameters alone, at step 0
  vit        images (digits), with a moving average, after 8 of 12 steps
  dense      a Transformer with biases, affine norms and learned positions, after 8 of 12 steps
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import released
import tiny_run
from stored_runs import measure

from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import saved_config

TEXT = {
  'model.pattern': 'layer*2',
  'model.width': 16,
  'model.layer.mixer.heads': 2,
  'model.vocab_size': 272,
  'model.layer.mixer.qkv.tokens': 12,
  'model.layer.mixer.proj.tokens': 8,
  'model.layer.ffn.tokens': 20,
  'data.source': 'files:corpus/*.txt',
  'data.cache_dir': 'cache',
  'data.tokenizer': 'bpe:272',
  'data.sequence_length': 16,
  'data.batch_size': 4,
  'data.validation_fraction': 0.3,
  'optim.learning_rate': 3e-3,
  'optim.warmup_steps': 3,
  'train.steps': 12,
  'train.log_every': 1,
  'train.eval_every': 0,
  'train.eval_batches': 1,
  'train.checkpoint_every': 1,
  'train.keep_checkpoints': 9,
  'train.sample_tokens': 0,
  'train.trackers': (),
}
DENSE = {
  # Counts of tokens are for models that have them.
  **{key: value for key, value in TEXT.items() if not key.endswith('.tokens')},
  'model.layer.mixer.qkv.kind': 'dense',
  'model.layer.mixer.qkv.bias': True,
  'model.layer.mixer.proj.kind': 'dense',
  'model.layer.mixer.proj.bias': True,
  'model.layer.mixer.window': 8,
  'model.layer.mixer.positions.kind': 'none',
  'model.layer.ffn.kind': 'mlp',
  'model.layer.ffn.bias': True,
  'model.layer.ffn.width': 24,
  'model.layer.norm': 'affine',
  'model.position_embedding': 'learned',
  'model.max_length': 20,
  'model.vocab_size': 256,
  'model.tied_head': False,
  'data.tokenizer': 'bytes',
  'train.remat': 'dots',
  'train.layers': 'unrolled',
}
VIT = {
  **tiny_run.VIT,
  'model.width': 16,
  'model.layer.mixer.heads': 2,
  'model.layer.mixer.qkv.tokens': 12,
  'model.layer.mixer.proj.tokens': 8,
  'model.layer.ffn.tokens': 20,
  'data.batch_size': 8,
  'model.drop_path': 0.1,
  'data.mixup': 0.5,
  'train.steps': 12,
  'train.log_every': 1,
  'train.checkpoint_every': 1,
  'train.keep_checkpoints': 9,
  'train.ema': 0.9,
  'train.remat': 'offload',
}


def _python(*arguments: str) -> None:
  subprocess.run([sys.executable, *arguments], check=True, env=tiny_run.environment())


def _train(name: str, stop: int, changes: dict[str, object], config: str = '') -> None:
  """Train a run to its end, and take it back to where it was after the step `stop`."""
  flags = [f'--config.{key}={tiny_run.as_flag(value)}' for key, value in changes.items()]
  if config:
    flags.insert(0, f'--config={tiny_run.ROOT}/configs/{config}.py')
  _python(str(tiny_run.ROOT / 'train.py'), f'--workdir={name}', *flags)
  workdir = Path(name)
  for folder in (workdir / 'checkpoints').iterdir():
    if folder.name != str(stop):
      shutil.rmtree(folder)
  lines = (workdir / 'metrics.jsonl').read_text().splitlines(keepends=True)
  kept = [line for line in lines if json.loads(line)['step'] <= stop]
  (workdir / 'metrics.jsonl').write_text(''.join(kept))


def _grow(source: str, target: str, *flags: str) -> None:
  _python('-m', 'tokenformer_jax', 'grow', f'--source={source}', f'--target={target}', *flags)


def _trained() -> None:
  _train('trained', 8, TEXT)


def _grown() -> None:
  _grow('trained', 'grown', '--param_tokens=qkv=16,ffn=28')
  _train('grown', 10, {'optim.new_token_warmup': 3, 'train.remat': 'full'})


def _frozen() -> None:
  _grow('grown', 'frozen', '--param_tokens=qkv=32,proj=16,ffn=56', '--method=zero_keys')
  changes = {'optim.old_tokens': 'freeze', 'optim.new_token_correction': True, 'train.steps': 14}
  _train('frozen', 11, changes)


def _converted() -> None:
  source = released.write(Path('foreign/model.safetensors'), dtype='float16')
  flags = [f'--{key}={value}' for key, value in released.OPTIONS.items()]
  _python(
    '-m', 'tokenformer_jax', 'convert', 'to-jax', f'--source={source}', '--target=converted', *flags
  )


def _vit() -> None:
  _train('vit', 8, VIT, 'vit_digits')


def _dense() -> None:
  _train('dense', 8, DENSE, 'transformer_stdlib')


RUNS: dict[str, Callable[[], None]] = {
  'trained': _trained,
  'grown': _grown,
  'frozen': _frozen,
  'converted': _converted,
  'vit': _vit,
  'dense': _dense,
}


def expected(run: Path) -> dict[str, object]:
  """Return the values that a run must reproduce; trains `run` further."""
  before = {
    'facts': measure.facts(run),
    'history': measure.history(run),
    'logits': measure.logits(run),
  }
  return {**before, 'losses': measure.next_losses(run)}


def main() -> None:
  """Write the runs of today's format."""
  jax.config.update('jax_platforms', 'cpu')
  target = measure.HERE / f'format_{saved_config.FORMAT}'
  target.mkdir()  # What is there stays as it is.
  with tempfile.TemporaryDirectory() as home:
    os.chdir(home)
    measure.write_data()
    for name, make in RUNS.items():
      make()
      folder = target / name
      folder.mkdir()
      for left in ('claim', '.cache'):
        shutil.rmtree(Path(name, left), ignore_errors=True)
      measure.pack(Path(name), folder / 'run.tar.xz')
    for name in RUNS:
      again = measure.unpack(target / name / 'run.tar.xz', Path('again'))
      text = json.dumps(expected(again), indent=1)
      (target / name / 'expected.json').write_text(f'{text}\n')


if __name__ == '__main__':
  sharding.find_devices = lambda: jax.devices()[:1]
  main()
