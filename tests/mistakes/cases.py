"""Mistakes that a user makes: what is typed, and what the sentence about it has to name.

A command starts with the verb; {in} is the folder of `inputs.py`, {lm}, {dense}, {learned} and
{vit} are runs, {repo} is the project, and {tiny} are flags of a small model of the text in {in}.
"""

from chat_cases import CHATS
from grow_cases import GROW
from law_cases import FAMILY, LAWS, SWEEP
from train_cases import TRAIN_CONFIGS, TRAIN_FILES, TRAIN_FLAGS, TRAIN_KEYS, TRAIN_VALUES

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
  'a chat and requests': (
    'generate --source={lm} --chat --requests=b',
    '--chat has no effect with --requests; leave out one of them',
  ),
  'a prompt and requests': ('generate --source={lm} --prompt=a --requests=b', '--requests'),
  'a question without text': (
    "generate --source={lm} --chat --prompt=' '",
    "--prompt is ' ', and --chat needs a question; write one, or leave --prompt out",
  ),
  'a stop string without text': (
    'generate --source={lm} --stop=',
    "--stop is ''; it must not be emp",
  ),
  'arguments of no template': (
    'generate --source={lm} --chat_template_kwargs={}',
    '--chat_template_kwargs has an effect only with --chat; leave it out',
  ),
  'requests that are not there': ('generate --source={lm} --requests=none.jsonl', 'none.jsonl'),
  'empty requests': ('generate --source={lm} --requests=', "--requests is ''"),
  'requests of nothing': ('generate --source={lm} --requests={in}/requests/empty.jsonl', 'has no'),
  'more groups than there are': ('generate --source={lm} --groups=2', 'from 1 to 1'),
  'groups of a Transformer': ('generate --source={dense} --groups=1', 'Transformer'),
  'a misspelt flag to write with': ('generate --source={lm} --temprature=1', '--temperature'),
  'a step that is a flag of training': ('generate --source={lm} --steps=1', '--steps is unknown'),
  'a prompt without its flag': (
    'generate --source={lm} hello',
    "unexpected argument 'hello'; flags",
  ),
  'more devices than there are': ('generate --source={lm} --token_shards=2', 'tokens=2'),
  'more tokens than learned positions': (
    'generate --source={learned} --max_length=33',
    'max_length is 33, but this model has learned positions for 32 tokens',
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
  'no text to evaluate on': ('evaluate --source={lm} --text=files:{in}/none', '{in}/none'),
  'a text without its kind': ('evaluate --source={lm} --text={in}/some/a.txt', '--text'),
  'a length beyond the positions': (
    'evaluate --source={lm} --text=files:{in}/some/*.txt --stride=100000',
    'stride',
  ),
}

PLOT = {
  'no run to draw': ('plot', 'no run is given'),
  'a folder that is no run to draw': ('plot {in}/some', 'is not a run'),
  'a metric that there is not': ('plot {lm} --y=train/los', "no metric 'train/los'"),
  'a picture of another kind': ('plot {lm} --out=x.gif', '--out=x.gif must end in'),
  'a picture in no folder': ('plot {lm} --out=none/x.png', '--out=none/x.png'),
  'a picture that is a folder': ('plot {lm} --out={in}/folder.png', 'is a folder'),
  'a run without figures': ('plot {in}/empty_run', 'has no figures yet'),
  'no run to report on': ('report', 'no run is given'),
  'a report that is a picture': ('report {lm} --out=x.png', '--out=x.png must end in .html'),
  'a name too long for a report': (
    'report {lm} --out=' + 'x' * 300 + '.html',
    '.html cannot be written: File name too long',
  ),
  'a flag without dashes beside runs': ('plot {lm} out=x.png', 'did you mean --out=x.png?'),
  'tokens of a run without a config': ('plot {in}/no_config --x=tokens', 'config.json'),
  'tokens of a run of images': ('plot {vit} --x=tokens', '--x=examples'),
}

INSPECT = {
  'no run to look into': ('inspect --source=none', 'none is not'),
  'a run of images to look into': ('inspect --source={vit}', '{vit}'),
  'a layer beyond the last': ('inspect --source={lm} --layer=7', '--layer is 7'),
  'a map in no folder': ('inspect --source={lm} --out=none/x.png', 'there is no folder none'),
  'no text to look at': ('inspect --source={lm} --text=files:{in}/none', '{in}/none'),
}

CONVERT = {
  'no command to convert': ('convert --source=a --target=b', 'to-jax'),
  'neither a command nor anything to convert': (
    'convert',
    'what to do: to-jax or to-torch or to-hf or to-peft; for example `tokenformer',
  ),
  'no target to convert': ('convert to-jax --source=a', '--target is missing: the new work dir'),
  'an unknown conversion': ('convert to-tf --source=a --target=b', "unknown command 'to-tf'"),
  'two conversions': ('convert to-jax to-torch --source=a --target=b', "'to-torch'"),
  'adapters without a name': (
    'convert to-jax --source=a --target=b --adapters=',
    "--adapters is ''; it must not be empty",
  ),
  'no weights': ('convert to-jax --source=none.bin --target=new', 'none.bin'),
  'a name of the hub to convert': (
    'convert to-jax --source=org/none@v1 --target=new',
    'org/none@v1 is no file or folder here and not whole in the cache of the hub',
  ),
  'a page of the hub to convert': (
    'convert to-jax --source=https://huggingface.co/org/none/tree/v1 --target=new',
    'org/none@v1 is no file or folder here and not whole in the cache of the hub',
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
  'a run to convert to a run': ('convert to-jax --source={lm} --target=new', '{lm}'),
  'an option of the other conversion': (
    'convert to-torch --source={lm} --target=new.safetensors --heads=4',
    '--heads has no meaning for to-torch',
  ),
  'a released model in a bucket': ('convert to-torch --source={lm} --target=gs://b/x', 'gs://b/x'),
  'a folder named like a file': (
    'convert to-hf --source={lm} --target=new.safetensors',
    'new.safetensors is named like a file, and is a folder',
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
  'processes beside those of Beam': (
    'prepare --config={repo}/configs/lm_stdlib.py --workers=2 --beam=--runner=DirectRunner',
    '--workers and --beam are both given',
  ),
  'nothing to verify': ('verify', 'give either --config=FILE or --store=DIR'),
  'a store that is not there': ('verify --store=none', 'none'),
  'a folder that is no store': ('verify --store={in}/some', '{in}/some'),
  'a store in a bucket of another company': ('verify --store=s3://b/x', 's3://b/x is neither a'),
  'images to verify': ('verify --config={repo}/configs/vit_digits.py', 'vit'),
  'the config of a store that is not there': (
    'verify --config={repo}/configs/lm_stdlib.py',
    'does not exist',
  ),
}

TEXTS = {
  'a text that is named twice': (
    "train {tiny} '--config.data.source=files:{in}/some/*.txt + files:{in}/some/b.txt'",
    'files:{in}/some/b.txt has {in}/some/b.txt twice; leave it out of one of them',
  ),
  'a folder of the user as a store': (
    'verify --store={in}/mine',
    '{in}/mine/meta.json is damaged; if {in}/mine is a token store, remove it',
  ),
}

GROUPS = (
  *(TRAIN_FLAGS, TRAIN_VALUES, TRAIN_FILES, CHATS, GENERATE, EVALUATE, PLOT),
  INSPECT,
  *(GROW, CONVERT, PLAN, VERIFY, SWEEP, FAMILY, LAWS, TEXTS),
)
CASES = {name: case for group in GROUPS for name, case in group.items()}
CONFIG_CASES = {**TRAIN_KEYS, **TRAIN_CONFIGS}
CASES |= {name: CONFIG_CASES[name] for name in ('a misspelt key', 'a config that raises')}
