"""Mistakes of `train`: see cases.py."""

TRAIN_FLAGS = {
  'a flag that is the end of a key': ('train --steps=100', '--config.train.steps'),
  'a flag that is the end of several keys': (
    'train --seed=3',
    '--config.train.seed or --config.grow.seed',
  ),
  'a flag with a hyphen': ('train --learning-rate=3', '--config.optim.learning_rate'),
  'a misspelt flag': ('train --work_dir=x', 'did you mean --workdir'),
  'a flag without its value': ('train --workdir', '--workdir has no value'),
  'an empty work directory': ('train --workdir=', "--workdir is ''"),
  'a status out of range': ('train --stopped_status=256', '--stopped_status is 256'),
  'a word that is no flag': (
    'train configs/lm_pile.py',
    "unexpected argument 'configs/lm_pile.py'",
  ),
  'a value for --no': ('train --noconfig.data.flip=3', 'noconfig.data.flip'),
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
  'a weight of one group of experts': (
    f'{_MIXTURE}balance.device_weight=0.1',
    'with balance.devices=1 there is nothing to balance between',
  ),
  'a capacity of nothing': (
    f'{_MIXTURE}dispatch.kind=capacity --config.model.layer.ffn.dispatch.least=0'
    ' --config.model.layer.ffn.dispatch.factor=0.001',
    'no expert has a place and every token is dropped; make it larger, or ffn.dispatch.least 1',
  ),
  'a capacity without places to share': (
    f'{_MIXTURE}dispatch.factor=2',
    'ffn.dispatch.factor is 2.0, which has a meaning for model.layer.ffn.dispatch.kind=capacity',
  ),
  'experts on devices that there are not': (
    f'{_MIXTURE}count=8 --config.mesh.experts=2',
    'tokens=1, and the product of these sizes must be the number of devices, 1',
  ),
}

_SOURCES = 'train {tiny} --config.data.mixture.a.source=files:{in}/corpus/*.txt --config.data.'

SOURCES = {
  'weights that do not add up': (
    f'{_SOURCES}source=stdlib --config.data.mixture.a.weight=0.5',
    'the weights of config.data.mixture add up to 0.5 (a 0.5); make them add up to 1',
  ),
  'a source without a name': (f'{_SOURCES}mixture..weight=1', "names a source '', which cannot be"),
}

_STAGES = 'train {tiny} --config.data.'

STAGES = {
  'steps of stages that go back': (
    f"{_STAGES}batch_size_by_step='0:8 9:16 4:8'",
    "config.data.batch_size_by_step is '0:8 9:16 4:8'; it must be points STEP:NUMBER with ascend",
  ),
  'a first stage after the first step': (
    f'{_STAGES}batch_size_by_step=9:16',
    "config.data.batch_size_by_step is '9:16'; it says nothing about the first steps; begin it",
  ),
  'a stage in parts that do not divide': (
    f"{_STAGES}batch_size_by_step='0:8 9:6' --config.optim.accumulation_steps=4",
    'in the stage of config.data after step 9, config.data.batch_size is 6, which is not a multi',
  ),
}

TRAIN_KEYS = {
  **EXPERTS,
  **SOURCES,
  **STAGES,
  'a skip around no projection': (
    'train --config.model.layer.mixer.value.kind=none --config.model.layer.mixer.value_skip=true',
    'mixer.value_skip is True, and value.kind=none has no projection to add the input to',
  ),
  'a norm of no feed-forward part': (
    'train --config.model.layer.ffn.kind=none --config.model.layer.ffn_norm=rms',
    'ffn_norm is rms, and with ffn.kind=none the layer has one norm',
  ),
  'a second norm of parallel parts': (
    'train --config.model.layer.wiring.kind=parallel --config.model.layer.ffn_norm=rms',
    'ffn_norm is rms, and with wiring.kind=parallel the layer has one norm; leave it out',
  ),
  'a misspelt key': ('train --config.model.widht=64', "did you mean 'model.width'"),
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
  'a teacher for images': (
    'train --config={repo}/configs/vit_digits.py --config.distill.teacher=x',
    "config.distill.teacher is 'x', which has a meaning for model.kind=lm only",
  ),
  'documents of images': (
    'train --config={repo}/configs/vit_digits.py --config.data.documents=masked',
    "config.data.documents is 'masked', which has a meaning for data.kind=text only",
  ),
  'another word for documents': (
    'train --config.data.documents=packed',
    "config.data.documents is 'packed'; it must be one of joined, masked, separate",
  ),
  'more than the whole weight for a teacher': (
    'train --config.distill.teacher=x --config.distill.weight=1.5',
    'config.distill.weight is 1.5; it must be at most 1',
  ),
  'a weight for no teacher': (
    'train --config.distill.weight=0.5',
    'config.distill.weight is 0.5, which has a meaning for distill.teacher only, and that is not '
    'set; leave it out',
  ),
  'a step beyond 32 bits': ('train --config.train.steps=1e12', 'config.train.steps is'),
  'a word for a number': ('train --config.optim.learning_rate=high', 'it must be a number'),
  'a misspelt tracker': (
    'train --config.train.trackers=tensorboard,wandbb',
    "has 'wandbb', which is unknown; did you mean 'wandb'?",
  ),
  'a tracker twice': ('train --config.train.trackers=wandb,wandb', 'it names wandb twice'),
  'no steps': ('train --config.train.steps=0', 'config.train.steps is 0'),
  'a seed too large': ('train --config.train.seed=3e9', 'less than 2147483648'),
  'a choice that there is not': ('train --config.train.remat=softmx', 'must be one of'),
  'a kind that there is not': (
    'train --config.model.layer.ffn.kind=mpl',
    'config.model.layer.ffn.kind is',
  ),
  'a key of another kind': (
    'train --config.model.layer.ffn.kind=mlp --config.model.layer.ffn.tokens=5',
    'which has a meaning for model.layer.ffn.kind=pattention only',
  ),
  'a key of softmax attention for a gated unit': (
    'train --config.model.layer.mixer.kind=gated_unit --config.model.layer.mixer.heads=2',
    'config.model.layer.mixer.heads is 2, which has a meaning for model.layer.mixer.kind=',
  ),
  'a window for linear attention': (
    'train --config.model.layer.mixer.kind=linear --config.model.layer.mixer.window=8',
    'config.model.layer.mixer.window is 8, which has a meaning for model.layer.mixer.kind=',
  ),
  'heads of keys that do not divide those of queries': (
    'train --config.model.layer.mixer.kv_heads=2',
    'mixer.kv_heads is 2, which does not divide model.layer.mixer.heads=3',
  ),
  'a key of a layer in the model': (
    'train --config.model.heads=8',
    "did you mean 'model.layer.mixer.heads'?",
  ),
  'a number of layers for a pattern': (
    'train --config.model.pattern=12',
    'did you mean "layer*12"?',
  ),
  'a layer of a name with a hyphen': (
    'train --config.model.variants.my-local.mixer.window=8',
    'config.model.variants.my-local cannot be the name of a layer; take a word of letters',
  ),
  'a layer that is not in the pattern': (
    'train --config.model.variants.local.mixer.window=8',
    "config.model.variants has 'local', which is not in model.pattern='layer*",
  ),
  'a pattern of a layer that there is not': (
    'train --config.model.pattern=locl*3 --config.model.variants.local.mixer.window=8',
    "'locl' is not a layer; did you mean 'local'",
  ),
  'layers as a value': ('train --config.model.variants=3', 'is a section of layers'),
  'a width of no whole heads': (
    'train --config.model.width=100 --config.model.layer.mixer.heads=3',
    'is not a multiple of',
  ),
  'a batch of no whole parts': (
    'train --config.optim.accumulation_steps=3',
    'is not a multiple of',
  ),
  'two lengths of a run': ('train --config.train.steps=5 --config.train.epochs=2', 'give one'),
  'a mesh of other devices': ('train --config.mesh.fsdp=3', 'number of devices, 1'),
  'a mesh of nothing': ('train --config.mesh.fsdp=0', 'config.mesh has'),
  'a kernel of other devices': ('train --config.train.attention=splash', 'the devices are cpu'),
  'a way to grow of a run from nothing': (
    'train {tiny} --workdir=new --config.grow.method.kind=zero_keys',
    "config.grow.method.kind is 'zero_keys', which has an effect only where a run begins from ",
  ),
  'a new order of a new run': (
    'train {tiny} --workdir=new --config.data.new_order_at=5',
    'config.data.new_order_at is 5, which has an effect only where a run goes on from the checkpo',
  ),
  'steps to profile behind the end': (
    'train {tiny} --workdir=new --config.train.steps=20 --config.train.profile_steps=30:31',
    'config.train.profile_steps is 30:31, and the run ends at step 20',
  ),
  'a range of steps that ends before it begins': (
    'train --config.train.profile_steps=5:2',
    "profile_steps is '5:2'; it must be FIRST:LAST, two step numbers from 1 on of which the last",
  ),
  'old tokens of no rate': ('train --config.optim.old_tokens=scale:x', 'scale:X'),
  'old tokens of a new model': ('train {tiny} --config.optim.old_tokens=freeze', 'old_tokens'),
  'a key of images for text': ('train --config.data.flip=true', 'config.data.flip'),
  'a key of text for images': (
    'train --config={repo}/configs/vit_digits.py --config.data.sequence_length=3',
    'config.data.sequence_length',
  ),
  'patches that do not fill an image': (
    'train --config={repo}/configs/vit_digits.py --config.model.patch=3',
    'is not a multiple of',
  ),
  'a vocabulary too small': ('train {tiny} --config.model.vocab_size=100', 'vocab_size is 100'),
  'a loss chunk of nothing': ('train --config.train.loss_chunk=0', 'config.train.loss_chunk is 0'),
}

TRAIN_CONFIGS = {
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
    'nothing.py, line 4, returns nothing',
  ),
  'a variant that there is not': (
    'train --config={in}/configs/variants.py:large',
    "variants.py, line 8, fails with KeyError: 'large'",
  ),
  'a variant for a config of none': (
    'train --config={in}/configs/typo.py:large',
    'line 4, takes no variant',
  ),
  'no variant for a config of some': (
    'train --config={in}/configs/needs_variant.py',
    'line 4, needs a variant',
  ),
  'a misspelt key in a config': (
    'train --config={in}/configs/typo.py',
    "'model.widht' is unknown; did you mean 'model.width'",
  ),
  'a wrong type in a config': (
    'train --config={in}/configs/wrong_type.py',
    'wrong_type.py, line 6, fails with TypeError',
  ),
  'a number for a group in a config': (
    'train --config={in}/configs/group_lost.py --config.model.width=3',
    'config.model is 3; it is a section of keys',
  ),
  'a division by nothing in a reference': (
    'train --config={in}/configs/reference.py --config.data.batch_size=0',
    'ZeroDivisionError',
  ),
  'the config of no run': ('train --config={repo}/configs/saved.py:{in}/some', 'config.json'),
  'the config of a run cut off': ('train --config={repo}/configs/saved.py:{in}/cut', 'cut/config'),
  'a work directory with a list for a config': (
    'train --workdir={in}/a_list',
    'a_list/config.json',
  ),
  'a work directory with a config cut off': (
    'train --workdir={in}/cut',
    'cut/config.json is damaged: it is not the config of a run',
  ),
  'a work directory with other keys': ('train --workdir={in}/other_keys', "did you mean 'model'"),
}

TRAIN_FILES = {
  'a work directory in a file': ('train {tiny} --workdir={in}/some/a.txt/run', 'cannot be written'),
  'a work directory that is a file': ('train {tiny} --workdir={in}/some/a.txt', 'some/a.txt'),
  'a bucket of another kind': ('train {tiny} --workdir=s3://bucket/run', 'neither a path'),
  'no text': ('train {tiny} --config.data.source=files:{in}/none/*.txt', '{in}/none/*.txt'),
  'a source like no other': ('train {tiny} --config.data.source=wikipedia', 'wikipedia'),
  'a dataset that is not there': ('train {tiny} --config.data.source=tfds:none', 'none'),
  'a set of rows that is not there': (
    'train {tiny} --config.data.source=hf:{in}/none',
    'config.data.source is hf:{in}/none, which is no folder; check the path',
  ),
  'a tokenizer that is not there': ('train {tiny} --config.data.tokenizer=none.json', 'none.json'),
  'a tokenizer that is none': (
    'train {tiny} --config.data.tokenizer={in}/tokenizer.json',
    'is not a tokenizer.json',
  ),
  'a vocabulary of three': ('train {tiny} --config.data.tokenizer=bpe:3', 'from 257 to 65536'),
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
  'the run of a smaller model, by tokenformer': (
    'tokenformer train {tiny} --workdir={lm} --config.model.pattern=layer*5',
    'python -m tokenformer_jax grow --source=DIR',
  ),
  'the run of another model': (
    'train {tiny} --workdir={lm} --config.model.pattern=layer*5',
    'pattern',
  ),
}
