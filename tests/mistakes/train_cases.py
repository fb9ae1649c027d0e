"""Mistakes of `train`: see cases.py. Those of TRAIN_KEYS and TRAIN_CONFIGS are in the config."""

TRAIN_FLAGS = {
  'a flag that is the end of a key': ('train --steps=100', '--config.train.steps'),
  'a flag that is the end of several keys': (
    'train --seed=3',
    '--config.train.seed or --config.grow.seed',
  ),
  'a misspelt flag': ('train --work_dir=x', 'did you mean --workdir'),
  'a flag without its value': ('train --workdir', '--workdir has no value'),
  'an empty work directory': ('train --workdir=', "--workdir is ''"),
  'a word that is no flag': (
    'train configs/lm_pile.py',
    "unexpected argument 'configs/lm_pile.py'; did you mean --config=configs/lm_pile.py?",
  ),
  'a key without dashes': (
    'train config.train.steps=3',
    "'config.train.steps=3' is no flag; did you mean --config.train.steps=3?",
  ),
  'a flag with the dash of a web page': ('train —workdir=x', 'did you mean --workdir=x?'),
  'a flag that is the end of most keys': (
    'train --kind=x',
    'did you mean --config.model.kind or --config.data.kind or --config.optim.kind or one of ',
  ),
  'a name longer than file systems have': ('train --workdir=' + 'x' * 300, 'give a shorter name'),
  'half of the flags of several hosts': ('train --num_processes=2', '--coordinator=HOST:PORT'),
  'a process beyond the last': (
    'train --coordinator=localhost:1 --num_processes=2 --process_id=5',
    '--process_id',
  ),
  'no processes': ('train --num_processes=0', '--num_processes=0: it must be a positive integer'),
}

_MIXTURE = 'train --config.model.layer.ffn.kind=experts --config.model.layer.ffn.'

EXPERTS = {
  'more experts of a token than there are': (
    f'{_MIXTURE}router.top_k=9',
    'ffn.router.top_k is 9, and there are config.model.layer.ffn.count=8 experts; take at most 8',
  ),
  'one gate divided by itself': (
    f'{_MIXTURE}router.renormalize=true',
    'ffn.router.renormalize is True with router.top_k=1, whose one gate would always be 1',
  ),
  'experts with biases': (
    f'{_MIXTURE}expert.bias=true',
    'config.model.layer.ffn.expert.bias is True, and experts have no biases; set it to False',
  ),
  'an expert of several groups': (
    f"{_MIXTURE}expert.kind=pattention --config.model.layer.ffn.expert.groups='64 64'",
    "ffn.expert.groups is '64:64*2', and the tokens of each expert are one group already",
  ),
  'groups of experts that do not divide': (
    f'{_MIXTURE}balance.devices=3',
    'ffn.balance.devices is 3, which does not divide the 8 experts; take a divisor',
  ),
  'a balance over a batch in parts': (
    f'{_MIXTURE}balance.over=batch --config.optim.accumulation_steps=2',
    'the ffn.balance.over of layer is batch, and with optim.accumulation_steps=2 it would be over'
    ' each part of a batch alone; set balance.over=sequence, or accumulation_steps to 1',
  ),
  'a capacity of nothing': (
    f'{_MIXTURE}dispatch.kind=capacity --config.model.layer.ffn.dispatch.least=0'
    ' --config.model.layer.ffn.dispatch.factor=0.001',
    'no expert has a place and every token is dropped; make it larger, or ffn.dispatch.least 1',
  ),
}

TRAIN_KEYS = {
  **EXPERTS,
  'a skip around no projection': (
    'train --config.model.layer.mixer.value.kind=none --config.model.layer.mixer.value_skip=true',
    'mixer.value_skip is True, and value.kind=none has no projection to add the input to',
  ),
  'a misspelt key': ('train --config.model.widht=64', "did you mean 'model.width'"),
  'a key that many sections have': (
    'train --config.kind=lm',
    ' others, which train --help=kind lists?',
  ),
  'a key of another section in a mixture': (
    'train --config.data.mixture.a.kind=text',
    'known names: rows, source, store, validation_source, weight, weight_by_step',
  ),
  'a misspelt entry of a list': (
    'train --config.train.trackers=tensorboard,wand',
    "config.train.trackers has 'wand'; it must be 'tensorboard', 'wandb', 'trackio' or 'mlflow'; "
    "did you mean 'wandb'?",
  ),
  'an entry of a list by its index': (
    'train --config.train.trackers.0=wandb',
    'config.train.trackers is a list A,B',
  ),
  'a misspelt kind': (
    'train --config.optim.kind=adamv',
    "must be one of adamw, muon, adafactor, lion; did you mean 'adamw'?",
  ),
  'a key without its group': ('train --config.batch_size=5', "did you mean 'data.batch_size'"),
  'a misspelt group': ('train --config.optimizer.beta1=0.5', "'optimizer' is unknown"),
  'a key below a key': ('train --config.model.width.x=1', 'config.model.width is a single value'),
  'a group as a value': (
    'train --config.model=3',
    "config.model.kind is '3'; it must be one of lm, vit",
  ),
  'a key without a value': ('train --config.train.steps', 'has no value'),
  'a word for an integer': ('train --config.train.steps=many', 'it must be an integer'),
  'a fraction for an integer': ('train --config.train.steps=1.5e0', 'it must be an integer'),
  'a word for a number': ('train --config.optim.learning_rate=high', 'it must be a number'),
  'no steps': ('train --config.train.steps=0', 'config.train.steps is 0'),
  'a number of layers for a pattern': (
    'train --config.model.pattern=12',
    'did you mean "layer*12"?',
  ),
  'layers as a value': ('train --config.model.variants=3', 'is a section of layers'),
  'steps to profile behind the end': (
    'train {tiny} --workdir=new --config.train.steps=20 --config.train.profile_steps=30:31',
    'config.train.profile_steps is 30:31, and the run ends at step 20',
  ),
}

TRAIN_CONFIGS = {
  'branches to drop without a skip': (
    'train --config={repo}/configs/vit_digits.py --config.model.drop_path=0.1'
    ' --config.model.layer.wiring=skipless',
    'model.layer.wiring.kind=skipless has no skip connection that would be left',
  ),
  'a config that is not there': ('train --config={in}/configs/none.py', 'there is no file'),
  'a misspelt config': (
    'train --config={in}/configs/nothin.py',
    'did you mean {in}/configs/nothing.py',
  ),
  'a folder for a config': ('train --config={in}/configs', 'is not a Python file'),
  'a json for a config': ('train --config={in}/config.json', 'is not a Python file'),
  'an empty config file': ('train --config={in}/configs/empty.py', 'has no function get_config'),
  'a get_config that is a number': (
    'train --config={in}/configs/not_callable.py',
    'has no function get_config',
  ),
  'a config that is not Python': ('train --config={in}/configs/syntax.py', 'syntax.py, line 4,'),
  'a config that imports what is not there': (
    'train --config={in}/configs/import.py',
    'import.py, line 1, fails with ModuleNotFoundError',
  ),
  'a config that raises': (
    'train --config={in}/configs/raises.py',
    'raises.py, line 6, fails with ZeroDivisionError',
  ),
  'a config that returns nothing': (
    'train --config={in}/configs/nothing.py',
    'nothing.py returns nothing',
  ),
  'a variant that there is not': (
    'train --config={in}/configs/variants.py:large',
    "variants.py, line 8, fails with KeyError: 'large'",
  ),
  'a variant for a config of none': (
    'train --config={in}/configs/typo.py:large',
    'typo.py:large: get_config() takes no variant; leave :large out',
  ),
  'no variant for a config of some': (
    'train --config={in}/configs/needs_variant.py',
    'get_config(variant) needs a variant; give --config={in}/configs/needs_variant.py:VARIANT',
  ),
  'a misspelt key in a config': (
    'train --config={in}/configs/typo.py',
    "'model.widht' is unknown; did you mean 'model.width'",
  ),
  'a wrong type in a config': (
    'train --config={in}/configs/wrong_type.py',
    "wrong_type.py, line 6: config.train.steps is 'many'; it must be an integer",
  ),
  'a list for a section in a config': (
    'train --config={in}/configs/list_of_kinds.py',
    "list_of_kinds.py, line 6: config.optim.schedule is ['wsd']; it must be one of cosine, linear,",
  ),
  'a name that is no config of the package': (
    'train --config=lm_nope',
    'there is no file lm_nope; known names: lm_bytes, lm_deepseekmoe, ',
  ),
  'the config of a run that is not named': (
    'train --config=saved',
    'get_config(workdir) needs a variant; give --config=saved:WORKDIR',
  ),
  'a number for a group in a config': (
    'train --config={in}/configs/group_lost.py --config.model.width=3',
    'config.model is 3; it must be a section of keys',
  ),
  'a division by nothing in a reference': (
    'train --config={in}/configs/reference.py --config.data.batch_size=0',
    'ZeroDivisionError',
  ),
  'the config of no run': ('train --config={repo}/configs/saved.py:{in}/some', 'config.json'),
  'the config of a run cut off': ('train --config={repo}/configs/saved.py:{in}/cut', 'cut/config'),
}

# Values that do not fit the devices, the data or the run.
TRAIN_VALUES = {
  'experts on devices that there are not': (
    f'{_MIXTURE}count=8 --config.mesh.experts=2',
    'tokens=1, and the product of these sizes must be the number of devices, 1',
  ),
  'a mesh of other devices': ('train --config.mesh.fsdp=3', 'number of devices, 1'),
  'a kernel of other devices': ('train --config.train.attention=splash', 'the devices are cpu'),
  'a way to grow of a run from nothing': (
    'train {tiny} --workdir=new --config.grow.method.kind=zero_keys',
    "config.grow.method.kind is 'zero_keys', which has an effect only where a run begins from ",
  ),
  'old tokens of a new model': ('train {tiny} --config.optim.old_tokens=freeze', 'old_tokens'),
  'a vocabulary too small': ('train {tiny} --config.model.vocab_size=100', 'vocab_size is 100'),
}

TRAIN_FILES = {
  'a work directory with a list for a config': (
    'train --workdir={in}/a_list',
    'a_list/config.json',
  ),
  'a folder that is not there for faulty hosts': (
    'train {tiny} --faulty_hosts=none/hosts',
    '--faulty_hosts=none/hosts cannot be written: there is no folder none',
  ),
  'a work directory in a file': ('train {tiny} --workdir={in}/some/a.txt/run', 'cannot be written'),
  'a work directory that is a file': ('train {tiny} --workdir={in}/some/a.txt', 'some/a.txt'),
  'a bucket of another kind': ('train {tiny} --workdir=s3://bucket/run', 'neither a path'),
  'no text': ('train {tiny} --config.data.source=files:{in}/none/*.txt', '{in}/none/*.txt'),
  'a source like no other': ('train {tiny} --config.data.source=wikipedia', 'wikipedia'),
  'a dataset that is not there': ('train {tiny} --config.data.source=tfds:none', 'none'),
  'a tokenizer that is not there': ('train {tiny} --config.data.tokenizer=none.json', 'none.json'),
  'a cache in a file': ('train {tiny} --config.data.cache_dir={in}/some/a.txt', 'some/a.txt'),
  'a cache in a bucket': ('train {tiny} --config.data.cache_dir=gs://b/c', 'gs://b/c'),
  'images that are not there': (
    'train --config={repo}/configs/vit_digits.py --config.data.source=folder:none',
    'none',
  ),
  'a start from no run': ('train {tiny} --config.init_from={in}/some', '{in}/some'),
  'a start from a step that is not there': (
    'train {tiny} --config.init_from={lm}@77',
    '77',
  ),
  'a start from another kind of model': ('train {tiny} --config.init_from={vit}', '{vit}'),
  'a teacher that is no run': (
    'train {tiny} --config.distill.teacher={in}/some',
    'config.distill.teacher={in}/some: {in}/some is not the work directory of a run',
  ),
  'a teacher of images': (
    'train {tiny} --config.distill.teacher={vit}',
    '{vit} is not a language model',
  ),
  'the run of a smaller model': (
    'train {tiny} --workdir={lm} --config.model.pattern=layer*5',
    'tokenformer grow --source=DIR',
  ),
}
