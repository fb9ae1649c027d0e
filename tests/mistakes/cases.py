"""Mistakes that a user makes: the command, and what the sentence about it has to name.

A command starts with the verb; {in} is the folder of `inputs.py`, {lm}, {dense}, {learned} and
{vit} are runs, {repo} is the project, and {tiny} are flags of a small model of the text in {in}.
"""

from chat_cases import CHATS
from grow_cases import GROW
from law_cases import FAMILY, LAWS, SWEEP
from train_cases import TRAIN_CONFIGS, TRAIN_FILES, TRAIN_FLAGS, TRAIN_KEYS, TRAIN_VALUES

GENERATE = {
  'generate': '--source is missing',
  'generate --source=none': 'none is not',
  'generate --source={in}/some': '{in}/some',
  'generate --source={in}/hub/not_weights': (
    'convert to-jax --source={in}/hub/not_weights --target=RUN`'
  ),
  'generate --source={lm}@last': 'DIR@STEP',
  'generate --source={lm}@99': '99',
  'generate --source={lm} --chat --requests=b': (
    '--chat has no effect with --requests; leave out one of them'
  ),
  'generate --source={lm} --prompt=a --requests=b': '--requests',
  "generate --source={lm} --chat --prompt=' '": (
    "--prompt is ' ', and --chat needs a question; write one, or leave --prompt out"
  ),
  'generate --source={lm} --stop=': "--stop is ''; it must not be emp",
  'generate --source={lm} --chat_template_kwargs={}': (
    '--chat_template_kwargs has an effect only with --chat; leave it out'
  ),
  'generate --source={lm} --requests=none.jsonl': 'none.jsonl',
  'generate --source={lm} --requests=': "--requests is ''",
  'generate --source={lm} --requests={in}/requests/empty.jsonl': 'has no',
  'generate --source={lm} --groups=2': 'from 1 to 1',
  'generate --source={dense} --groups=1': 'Transformer',
  'generate --source={lm} --temprature=1': '--temperature',
  'generate --source={lm} --steps=1': '--steps is unknown',
  'generate --source={lm} hello': "unexpected argument 'hello'; flags",
  'generate --source={lm} --token_shards=2': 'tokens=2',
  'generate --source={learned} --max_length=33': (
    'max_length is 33, but this model has learned positions for 32 tokens'
  ),
}

EVALUATE = {
  'evaluate --source={lm}': '--tasks=NAME',
  'evaluate --text=files:{in}/some/*.txt': '--source is missing',
  'evaluate --source=none --text=files:{in}/some/*.txt': 'none is not',
  'evaluate --source={in}/weights.safetensors --text=files:{in}/some/*.txt': (
    'convert to-jax --source={in}/weights.safetensors'
  ),
  'evaluate --source={vit} --text=files:{in}/some/*.txt': '{vit}',
  'evaluate --source={lm} --text=files:{in}/some/*.txt --output=none/x.json': (
    'there is no folder none'
  ),
  'evaluate --source={lm} --text=files:{in}/some/*.txt --output={in}/some': 'is a folder',
  'evaluate --source={lm} --text=files:{in}/none': '{in}/none',
  'evaluate --source={lm} --text={in}/some/a.txt': '--text',
  'evaluate --source={lm} --text=files:{in}/some/*.txt --stride=100000': 'stride',
}

PLOT = {
  'plot': 'no run is given',
  'plot {in}/some': 'is not a run',
  'plot {lm} --y=train/los': "no metric 'train/los'",
  'plot {lm} --out=x.gif': '--out=x.gif must end in',
  'plot {lm} --out=none/x.png': '--out=none/x.png',
  'plot {lm} --out={in}/folder.png': 'is a folder',
  'plot {in}/empty_run': 'has no figures yet',
  'report': 'no run is given',
  'report {lm} --out=x.png': '--out=x.png must end in .html',
  'report {lm} --out=' + 'x' * 300 + '.html': '.html cannot be written: File name too long',
  'plot {lm} out=x.png': 'did you mean --out=x.png?',
  'plot {in}/no_config --x=tokens': 'config.json',
  'plot {vit} --x=tokens': '--x=examples',
}

INSPECT = {
  'inspect --source=none': 'none is not',
  'inspect --source={vit}': '{vit}',
  'inspect --source={lm} --layer=7': '--layer is 7',
  'inspect --source={lm} --out=none/x.png': 'there is no folder none',
  'inspect --source={lm} --text=files:{in}/none': '{in}/none',
}

CONVERT = {
  'convert --source=a --target=b': 'to-jax',
  'convert': 'what to do: to-jax or to-torch or to-hf or to-peft; for example `tokenformer',
  'convert to-jax --source=a': '--target is missing: the new work dir',
  'convert to-tf --source=a --target=b': "unknown command 'to-tf'",
  'convert to-jax to-torch --source=a --target=b': "'to-torch'",
  'convert to-jax --source=a --target=b --adapters=': "--adapters is ''; it must not be empty",
  'convert to-jax --source=none.bin --target=new': 'none.bin',
  'convert to-jax --source=org/none@v1 --target=new': (
    'org/none@v1 is no file or folder here and not whole in the cache of the hub'
  ),
  'convert to-jax --source=https://huggingface.co/org/none/tree/v1 --target=new': (
    'org/none@v1 is no file or folder here and not whole in the cache of the hub'
  ),
  'convert to-jax --source={in}/weights.bin --target=new': 'weights.bin',
  'convert to-jax --source={in}/weights.safetensors --target=new': 'weights.safetensors',
  'convert to-jax --source={in}/weights.onnx --target=new': '.onnx',
  'convert to-jax --source={in}/some --target=new': '{in}/some',
  'convert to-jax --source={in}/hub/unknown --target=new': "'BertModel'",
  'convert to-jax --source={in}/hub/code --target=new': 'is never run here',
  'convert to-jax --source={in}/hub/option --target=new': "='mish'",
  'convert to-jax --source={in}/hub/cut --target=new': 'hub/cut/config.json',
  'convert to-jax --source={in}/hub/shards --target=new': (
    'names model-1.safetensors, which is not in its folder'
  ),
  'convert to-jax --source={in}/hub/no_weights --target=new': 'hub/no_weights has no .bin',
  'convert to-jax --source={in}/hub/not_weights --target=new --heads=4': (
    '--heads has no meaning for {in}/hub/not_weights, whose config.json says it; leave it out'
  ),
  'convert to-jax --source={lm} --target=new': '{lm}',
  'convert to-torch --source={lm} --target=new.safetensors --heads=4': (
    '--heads has no meaning for to-torch'
  ),
  'convert to-torch --source={lm} --target=gs://b/x': 'gs://b/x',
  'convert to-hf --source={lm} --target=new.safetensors': (
    'new.safetensors is named like a file, and is a folder'
  ),
}

PLAN = {
  'plan --topology=v5e:4x4': '--config is missing',
  'plan --topology=v5e:4x4 --config.data.batch_size=8': '--config is missing',
  'plan --config={repo}/configs/lm_stdlib.py': '--topology is missing: CHIP:SHAPE, such',
  'plan --config={repo}/configs/lm_stdlib.py --topology=mi300:1': (
    'known names: b200, h100, h200, tpu7x, v4, v5e, v5p, v6e'
  ),
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --tune '
  "--config.data.batch_size_by_step='0:8 9:16'": '--tune plans batches of one size',
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e': 'v5e:4x4',
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5p:4x4': 'v5p:4x4x4',
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --tune --grow=ffn=900': (
    '--tune and --grow'
  ),
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --grow=fnn=900': (
    "did you mean 'ffn'"
  ),
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --grow=ffn=9': '--grow=ffn=9',
  'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --json=none/x.json': (
    'there is no folder none'
  ),
}

VERIFY = {
  'prepare': '--config',
  'prepare --config={repo}/configs/vit_digits.py': (
    'config.model.kind is vit, which has no token store'
  ),
  'prepare --config={repo}/configs/lm_stdlib.py --workers=2 --beam=--runner=DirectRunner': (
    '--workers and --beam are both given'
  ),
  'verify': 'give either --config=FILE or --store=DIR',
  'verify --store=none': 'none',
  'verify --store={in}/some': '{in}/some',
  'verify --store=s3://b/x': 's3://b/x is neither a',
  'verify --config={repo}/configs/vit_digits.py': 'vit',
  'verify --config={repo}/configs/lm_stdlib.py': 'does not exist',
}

TEXTS = {
  "train {tiny} '--config.data.source=files:{in}/some/*.txt + files:{in}/some/b.txt'": (
    'files:{in}/some/b.txt has {in}/some/b.txt twice; leave it out of one of them'
  ),
  'verify --store={in}/mine': (
    '{in}/mine/meta.json is damaged; if {in}/mine is a token store, remove it'
  ),
}

GROUPS = (
  *(TRAIN_FLAGS, TRAIN_VALUES, TRAIN_FILES, CHATS, GENERATE, EVALUATE, PLOT),
  INSPECT,
  *(GROW, CONVERT, PLAN, VERIFY, SWEEP, FAMILY, LAWS, TEXTS),
)
CONFIG_CASES = {**TRAIN_KEYS, **TRAIN_CONFIGS}
_WHOLE = ('train --config.model.widht=64', 'train --config={in}/configs/raises.py')
CASES = {command: sentence for group in GROUPS for command, sentence in group.items()}
CASES |= {command: CONFIG_CASES[command] for command in _WHOLE}
