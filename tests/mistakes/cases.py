"""Mistakes that a user makes: what is typed, and what the sentence about it has to name.

A command starts with the verb; {in} is the folder of `inputs.py`, {lm}, {dense}, {learned} and
{vit} are runs, {repo} is the project, and {tiny} are flags of a small model of the text in {in}.
"""

from chat_cases import CHATS
from grow_cases import GROW
from guard_cases import GUARDS
from law_cases import FAMILY, LAWS, SWEEP
from text_cases import TEXTS
from train_cases import TRAIN_CONFIGS, TRAIN_FILES, TRAIN_FLAGS, TRAIN_KEYS

GENERATE = {
  'no source': ('generate', '--source is missing'),
  'no run to write with': ('generate --source=none', 'none is not'),
  'a folder that is no run to write with': ('generate --source={in}/some', '{in}/some'),
  'a folder of the hub to write with': (
    'generate --source={in}/hub/not_weights',
    'convert to-jax --source={in}/hub/not_weights --target=RUN`',
  ),
  'a step in words': ('generate --source={lm}@last', 'DIR@STEP'),
  'a step that is not there': ('generate --source={lm}@99', '99'),
  'a run of images to write with': ('generate --source={vit}', '{vit}'),
  'a chat with a run on text': (
    'generate --source={lm} --chat',
    '{lm} was trained on plain text, so it has no chat template',
  ),
  'a chat and requests': (
    'generate --source={lm} --chat --requests=b',
    '--chat has no effect with --requests; leave out one of them',
  ),
  'a prompt and requests': ('generate --source={lm} --prompt=a --requests=b', '--requests'),
  'requests that are not there': ('generate --source={lm} --requests=none.jsonl', 'none.jsonl'),
  'empty requests': ('generate --source={lm} --requests=', "--requests is ''"),
  'requests of nothing': ('generate --source={lm} --requests={in}/requests/empty.jsonl', 'has no'),
  'a misspelt key of a request': (
    'generate --source={lm} --requests={in}/requests/unknown.jsonl',
    "did you mean 'length'",
  ),
  'a negative temperature': ('generate --source={lm} --temperature=-1', 'temperature is -1'),
  'no groups to write with': ('generate --source={lm} --groups=0', '--groups is 0'),
  'more groups than there are': ('generate --source={lm} --groups=2', 'from 1 to 1'),
  'groups of a Transformer': ('generate --source={dense} --groups=1', 'Transformer'),
  'a misspelt flag to write with': ('generate --source={lm} --temprature=1', '--temperature'),
  'a step that is a flag of training': ('generate --source={lm} --steps=1', '--steps is unknown'),
  'a prompt without its flag': ('generate --source={lm} hello', "unexpected argument 'hello'"),
  'more devices than there are': ('generate --source={lm} --token_shards=2', 'tokens=2'),
  'no devices': ('generate --source={lm} --token_shards=0', '--token_shards is 0'),
  'more tokens than learned positions': (
    'generate --source={learned} --max_length=33',
    'max_length is 33, but this model has learned positions for 32 tokens',
  ),
  'a text of more tokens than learned positions': (
    'generate --source={learned} --length=32',
    'the prompt and the text to write are 33 tokens',
  ),
  'a prompt without room for a text': (
    'generate --source={lm} --prompt=abc --max_length=4',
    'a prompt is 4 tokens',
  ),
  'a negative distance': (
    'generate --source={lm} --clip_positions=-1',
    '--clip_positions is -1; it must be at least 1',
  ),
}

EVALUATE = {
  'nothing to evaluate on': ('evaluate --source={lm}', '--tasks=NAME'),
  'no source to evaluate': ('evaluate --text=files:{in}/some/*.txt', '--source is missing'),
  'no run to evaluate': ('evaluate --source=none --text=files:{in}/some/*.txt', 'none is not'),
  'weights to evaluate': (
    'evaluate --source={in}/weights.safetensors --text=files:{in}/some/*.txt',
    'convert to-jax --source={in}/weights.safetensors',
  ),
  'a run of images to evaluate': ('evaluate --source={vit} --text=files:{in}/some/*.txt', '{vit}'),
  'an output in no folder': (
    'evaluate --source={lm} --text=files:{in}/some/*.txt --output=none/x.json',
    'there is no folder none',
  ),
  'an output that is a folder': (
    'evaluate --source={lm} --text=files:{in}/some/*.txt --output={in}/some',
    'is a folder',
  ),
  'an output in a bucket': (
    'evaluate --source={lm} --text=files:{in}/some/*.txt --output=gs://b/x.json',
    'gs://b/x.json',
  ),
  'no text to evaluate on': ('evaluate --source={lm} --text=files:{in}/none', '{in}/none'),
  'a text without its kind': ('evaluate --source={lm} --text={in}/some/a.txt', '--text'),
  'tasks in no folder': (
    'evaluate --source={lm} --tasks=a --include_path=none',
    '--include_path=none',
  ),
  'a length beyond the positions': (
    'evaluate --source={lm} --text=files:{in}/some/*.txt --stride=100000',
    'stride',
  ),
  'more tokens of input than learned positions': (
    'evaluate --source={learned} --text=files:{in}/some/*.txt --max_length=33',
    'max_length is 33, but this model has learned positions for 32 tokens',
  ),
  'examples of less than nothing': ('evaluate --source={lm} --tasks=a --num_fewshot=-1', '-1'),
}

PLOT = {
  'no run to draw': ('plot', 'no run is given'),
  'a folder that is no run to draw': ('plot {in}/some', 'is not a run'),
  'a metric that there is not': ('plot {lm} --y=train/los', "no metric 'train/los'"),
  'an axis that there is not': ('plot {lm} --x=epochs', "--x is 'epochs'"),
  'a picture of another kind': ('plot {lm} --out=x.gif', '--out=x.gif must end in'),
  'a picture in no folder': ('plot {lm} --out=none/x.png', '--out=none/x.png'),
  'a picture that is a folder': ('plot {lm} --out={in}/folder.png', 'is a folder'),
  'a run without figures': ('plot {in}/empty_run', 'has no figures yet'),
  'figures cut off': ('plot {in}/broken_run', 'has no figures yet'),
  'no run to report on': ('report', 'no run is given'),
  'a run without figures to report on': ('report {lm} {in}/empty_run', 'has no figures yet'),
  'a report that is a picture': ('report {lm} --out=x.png', '--out=x.png must end in .html'),
  'less than no models to look into': ('report {lm} --models=-1', '--models is -1'),
  'tokens of a run without a config': ('plot {in}/no_config --x=tokens', 'config.json'),
  'tokens of a run of images': ('plot {vit} --x=tokens', '--x=examples'),
}

INSPECT = {
  'no run to look into': ('inspect --source=none', 'none is not'),
  'no source to look into': ('inspect', '--source is missing'),
  'matrices to look into': ('inspect --source={dense} --kinds=query', "--kinds names 'query'"),
  'a run of images to look into': ('inspect --source={vit}', '{vit}'),
  'a layer beyond the last': ('inspect --source={lm} --layer=7', '--layer is 7'),
  'a kind that there is not': ('inspect --source={lm} --kinds=qery', "did you mean 'query'"),
  'a map of another kind': ('inspect --source={lm} --out=x.gif', '--out=x.gif must end in'),
  'a map in no folder': ('inspect --source={lm} --out=none/x.png', 'there is no folder none'),
  'no text to look at': ('inspect --source={lm} --text=files:{in}/none', '{in}/none'),
  'nothing of the text': ('inspect --source={lm} --length=0', '--length is 0'),
}

CONVERT = {
  'no command to convert': ('convert --source=a --target=b', 'to-jax'),
  'neither a command nor anything to convert': (
    'convert',
    'what to do: to-jax or to-torch or to-hf; for example `python -m',
  ),
  'no target to convert': ('convert to-jax --source=a', '--target is missing: the new work dir'),
  'an unknown conversion': ('convert to-tf --source=a --target=b', "unknown command 'to-tf'"),
  'two conversions': ('convert to-jax to-torch --source=a --target=b', "'to-torch'"),
  'no weights': ('convert to-jax --source=none.bin --target=new', 'none.bin'),
  'a name of the hub to convert': (
    'convert to-jax --source=meta-llama/Llama-3.2-1B --target=new',
    'meta-llama/Llama-3.2-1B is not a file or directory here; name a .bin or .safetensors file or '
    'the folder of a model; `hf download NAME --local-dir FOLDER`',
  ),
  'weights that are none': ('convert to-jax --source={in}/weights.bin --target=new', 'weights.bin'),
  'safetensors that are none': (
    'convert to-jax --source={in}/weights.safetensors --target=new',
    'weights.safetensors',
  ),
  'weights of another kind': ('convert to-jax --source={in}/weights.onnx --target=new', '.onnx'),
  'a folder without weights': ('convert to-jax --source={in}/some --target=new', '{in}/some'),
  'an unknown architecture': (
    'convert to-jax --source={in}/hub/unknown --target=new',
    "'BertModel'",
  ),
  'a model with code': ('convert to-jax --source={in}/hub/code --target=new', 'is never run here'),
  'an option that we lack': ('convert to-jax --source={in}/hub/option --target=new', "='mish'"),
  'a config that is cut': (
    'convert to-jax --source={in}/hub/cut --target=new',
    'hub/cut/config.json',
  ),
  'shards that are missing': (
    'convert to-jax --source={in}/hub/shards --target=new',
    'names model-1.safetensors, which is not in its folder',
  ),
  'a model without weights': (
    'convert to-jax --source={in}/hub/no_weights --target=new',
    'hub/no_weights has no .bin',
  ),
  'a model whose weights are none': (
    'convert to-jax --source={in}/hub/not_weights --target=new',
    'is not a safetensors file',
  ),
  'a run to convert to a run': ('convert to-jax --source={lm} --target=new', '{lm}'),
  'an option of the other conversion': (
    'convert to-torch --source={lm} --target=new.safetensors --heads=4',
    '--heads has no meaning for to-torch',
  ),
  'a released model in a bucket': ('convert to-torch --source={lm} --target=gs://b/x', 'gs://b/x'),
  'no run to convert': ('convert to-torch --source=none --target=new.safetensors', 'none is not'),
  'a run of images to convert': (
    'convert to-torch --source={vit} --target=new',
    'is not a language model',
  ),
  'a folder of images': ('convert to-hf --source={vit} --target=new', 'is not a language model'),
  'a folder that is there': ('convert to-hf --source={lm} --target={in}', 'exists; name a new dir'),
  'a folder named like a file': (
    'convert to-hf --source={lm} --target=new.safetensors',
    'new.safetensors is named like a file, and is a folder',
  ),
  'a folder in a bucket': ('convert to-hf --source={lm} --target=gs://b/x', 'gs://b/x'),
  'a type that there is not': (
    'convert to-torch --source={lm} --target=new.safetensors --dtype=float8',
    "--dtype is 'float8'; it must be one of",
  ),
}

PLAN = {
  'no config to plan': ('plan --topology=v5e:4x4', '--config is missing'),
  'a key without its config to plan': (
    'plan --topology=v5e:4x4 --config.data.batch_size=8',
    '--config is missing',
  ),
  'no topology': (
    'plan --config={repo}/configs/lm_stdlib.py',
    '--topology is missing: CHIP:SHAPE, such',
  ),
  'a chip that there is not': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=h100:1',
    'known names: tpu7x, v4, v5e, v5p, v6e',
  ),
  'stages in a search of plans': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --tune '
    "--config.data.batch_size_by_step='0:8 9:16'",
    '--tune plans batches of one size',
  ),
  'a chip of no shape': ('plan --config={repo}/configs/lm_stdlib.py --topology=v5e', 'v5e:4x4'),
  'a shape of another chip': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5p:4x4',
    'v5p:4x4x4',
  ),
  'no slices': ('plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --slices=0', '0'),
  'two questions': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --tune --grow=ffn=900',
    '--tune and --grow',
  ),
  'a stage of a kind that there is not': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --grow=fnn=900',
    "did you mean 'ffn'",
  ),
  'a stage of fewer tokens': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --grow=ffn=9',
    '--grow=ffn=9',
  ),
  'figures in no folder': (
    'plan --config={repo}/configs/lm_stdlib.py --topology=v5e:4x4 --json=none/x.json',
    'there is no folder none',
  ),
}

VERIFY = {
  'nothing to prepare': ('prepare', '--config'),
  'images to prepare': (
    'prepare --config={repo}/configs/vit_digits.py',
    'config.model.kind is vit, which has no token store',
  ),
  'no worker to prepare': (
    'prepare --config={repo}/configs/lm_stdlib.py --workers=0',
    '--workers is 0',
  ),
  'processes beside those of Beam': (
    'prepare --config={repo}/configs/lm_stdlib.py --workers=2 --beam=--runner=DirectRunner',
    '--workers and --beam are both given',
  ),
  'bad documents kept': (
    'prepare --config={repo}/configs/lm_stdlib.py --bad=keep',
    'one of fail, skip',
  ),
  'a store among other files': (
    'prepare --config={repo}/configs/lm_stdlib.py --out={in}/some',
    'which does not belong to a token store; name a new folder with --out',
  ),
  'nothing to verify': ('verify', 'give either --config=FILE or --store=DIR'),
  'a store that is not there': ('verify --store=none', 'none'),
  'a folder that is no store': ('verify --store={in}/some', '{in}/some'),
  'a store in a bucket of another company': ('verify --store=s3://b/x', 's3://b/x is neither a'),
  'images to verify': ('verify --config={repo}/configs/vit_digits.py', 'vit'),
  'a mixture to verify': (
    'verify --config={repo}/configs/lm_stdlib.py --config.data.mixture.a.weight=1 '
    '--config.data.mixture.a.source=files:{in}/corpus/*.txt',
    'the tokenizer bpe:2048 of config.data.mixture was not trained yet',
  ),
  'the config of a store that is not there': (
    'verify --config={repo}/configs/lm_stdlib.py',
    'does not exist',
  ),
}

# The harness takes seconds to find its tasks.
HARNESS = {
  'a task that there is not': ('evaluate --source={lm} --tasks=lambda_openai', 'lambada_openai'),
  'a task like no other': ('evaluate --source={lm} --tasks=qqqqqqqq', 'qqqqqqqq'),
}

GROUPS = (
  *(TRAIN_FLAGS, TRAIN_KEYS, TRAIN_CONFIGS, TRAIN_FILES, CHATS, GUARDS, GENERATE, EVALUATE, PLOT),
  INSPECT,
  *(GROW, CONVERT, PLAN, VERIFY, SWEEP, FAMILY, LAWS, TEXTS),
)
CASES = {name: case for group in GROUPS for name, case in group.items()}
SLOW_CASES = HARNESS
