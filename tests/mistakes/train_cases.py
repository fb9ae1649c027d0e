"""Mistakes of `train`: see cases.py. Those of TRAIN_KEYS and TRAIN_CONFIGS are in the config."""

TRAIN_FLAGS = {
  'train --steps=100': '--config.train.steps',
  'train --seed=3': '--config.train.seed or --config.grow.seed',
  'train --work_dir=x': 'did you mean --workdir',
  'train --workdir': '--workdir has no value',
  'train --workdir=': "--workdir is ''",
  'train configs/lm_pile.py': (
    "unexpected argument 'configs/lm_pile.py'; did you mean --config=configs/lm_pile.py?"
  ),
  'train config.train.steps=3': (
    "'config.train.steps=3' is no flag; did you mean --config.train.steps=3?"
  ),
  'train —workdir=x': 'did you mean --workdir=x?',
  'train --kind=x': (
    'did you mean --config.model.kind or --config.data.kind or --config.optim.kind or one of '
  ),
  'train --workdir=' + 'x' * 300: 'give a shorter name',
  'train --num_processes=2': '--coordinator=HOST:PORT',
  'train --coordinator=localhost:1 --num_processes=2 --process_id=5': '--process_id',
  'train --num_processes=0': '--num_processes=0: it must be a positive integer',
}

_MIXTURE = 'train --config.model.layer.ffn.kind=experts --config.model.layer.ffn.'

EXPERTS = {
  f'{_MIXTURE}router.top_k=9': (
    'ffn.router.top_k is 9, and there are config.model.layer.ffn.count=8 experts; take at most 8'
  ),
  f'{_MIXTURE}router.renormalize=true': (
    'ffn.router.renormalize is True with router.top_k=1, whose one gate would always be 1'
  ),
  f'{_MIXTURE}expert.bias=true': (
    'config.model.layer.ffn.expert.bias is True, and experts have no biases; set it to False'
  ),
  f"{_MIXTURE}expert.kind=pattention --config.model.layer.ffn.expert.groups='64 64'": (
    "ffn.expert.groups is '64:64*2', and the tokens of each expert are one group already"
  ),
  f'{_MIXTURE}balance.devices=3': (
    'ffn.balance.devices is 3, which does not divide the 8 experts; take a divisor'
  ),
  f'{_MIXTURE}balance.over=batch --config.optim.accumulation_steps=2': (
    'the ffn.balance.over of layer is batch, and with optim.accumulation_steps=2 it would be over'
    ' each part of a batch alone; set balance.over=sequence, or accumulation_steps to 1'
  ),
  f'{_MIXTURE}dispatch.kind=capacity --config.model.layer.ffn.dispatch.least=0'
  ' --config.model.layer.ffn.dispatch.factor=0.001': (
    'no expert has a place and every token is dropped; make it larger, or ffn.dispatch.least 1'
  ),
}

TRAIN_KEYS = {
  **EXPERTS,
  'train --config.model.layer.mixer.value.kind=none --config.model.layer.mixer.value_skip=true': (
    'mixer.value_skip is True, and value.kind=none has no projection to add the input to'
  ),
  'train --config.model.widht=64': "did you mean 'model.width'",
  'train --config.kind=lm': ' others, which train --help=kind lists?',
  'train --config.data.mixture.a.kind=text': (
    'known names: rows, source, store, validation_source, weight, weight_by_step'
  ),
  'train --config.train.trackers=tensorboard,wand': (
    "config.train.trackers has 'wand'; it must be 'tensorboard', 'wandb', 'trackio' or 'mlflow'; "
    "did you mean 'wandb'?"
  ),
  'train --config.train.trackers.0=wandb': 'config.train.trackers is a list A,B',
  'train --config.optim.kind=adamv': (
    "must be one of adamw, muon, adafactor, lion; did you mean 'adamw'?"
  ),
  'train --config.batch_size=5': "did you mean 'data.batch_size'",
  'train --config.optimizer.beta1=0.5': "'optimizer' is unknown",
  'train --config.model.width.x=1': 'config.model.width is a single value',
  'train --config.model=3': "config.model.kind is '3'; it must be one of lm, vit",
  'train --config.train.steps': 'has no value',
  'train --config.train.steps=many': 'it must be an integer',
  'train --config.train.steps=1.5e0': 'it must be an integer',
  'train --config.optim.learning_rate=high': 'it must be a number',
  'train --config.train.steps=0': 'config.train.steps is 0',
  'train --config.model.pattern=12': 'did you mean "layer*12"?',
  'train --config.model.variants=3': 'is a section of layers',
  'train {tiny} --workdir=new --config.train.steps=20 --config.train.profile_steps=30:31': (
    'config.train.profile_steps is 30:31, and the run ends at step 20'
  ),
}

TRAIN_CONFIGS = {
  'train --config={repo}/configs/vit_digits.py --config.model.drop_path=0.1'
  ' --config.model.layer.wiring=skipless': (
    'model.layer.wiring.kind=skipless has no skip connection that would be left'
  ),
  'train --config={in}/configs/none.py': 'there is no file',
  'train --config={in}/configs/nothin.py': 'did you mean {in}/configs/nothing.py',
  'train --config={in}/configs': 'is not a Python file',
  'train --config={in}/config.json': 'is not a Python file',
  'train --config={in}/configs/empty.py': 'has no function get_config',
  'train --config={in}/configs/not_callable.py': 'has no function get_config',
  'train --config={in}/configs/syntax.py': 'syntax.py, line 4,',
  'train --config={in}/configs/import.py': 'import.py, line 1, fails with ModuleNotFoundError',
  'train --config={in}/configs/raises.py': 'raises.py, line 6, fails with ZeroDivisionError',
  'train --config={in}/configs/nothing.py': 'nothing.py returns nothing',
  'train --config={in}/configs/variants.py:large': (
    "variants.py, line 8, fails with KeyError: 'large'"
  ),
  'train --config={in}/configs/typo.py:large': (
    'typo.py:large: get_config() takes no variant; leave :large out'
  ),
  'train --config={in}/configs/needs_variant.py': (
    'get_config(variant) needs a variant; give --config={in}/configs/needs_variant.py:VARIANT'
  ),
  'train --config={in}/configs/typo.py': "'model.widht' is unknown; did you mean 'model.width'",
  'train --config={in}/configs/wrong_type.py': (
    "wrong_type.py, line 6: config.train.steps is 'many'; it must be an integer"
  ),
  'train --config={in}/configs/list_of_kinds.py': (
    "list_of_kinds.py, line 6: config.optim.schedule is ['wsd']; it must be one of cosine, linear,"
  ),
  'train --config=lm_nope': 'there is no file lm_nope; known names: lm_bytes, lm_deepseekmoe, ',
  'train --config=saved': 'get_config(workdir) needs a variant; give --config=saved:WORKDIR',
  'train --config={in}/configs/group_lost.py --config.model.width=3': (
    'config.model is 3; it must be a section of keys'
  ),
  'train --config={in}/configs/reference.py --config.data.batch_size=0': 'ZeroDivisionError',
  'train --config={repo}/configs/saved.py:{in}/some': 'config.json',
  'train --config={repo}/configs/saved.py:{in}/cut': 'cut/config',
}

# Values that do not fit the devices, the data or the run.
TRAIN_VALUES = {
  f'{_MIXTURE}count=8 --config.mesh.experts=2': (
    'tokens=1, and the product of these sizes must be the number of devices, 1'
  ),
  'train --config.mesh.fsdp=3': 'number of devices, 1',
  'train --config.train.attention=splash': 'the devices are cpu',
  'train {tiny} --workdir=new --config.grow.method.kind=zero_keys': (
    "config.grow.method.kind is 'zero_keys', which has an effect only where a run begins from "
  ),
  'train {tiny} --config.optim.old_tokens=freeze': 'old_tokens',
  'train {tiny} --config.model.vocab_size=100': 'vocab_size is 100',
}

TRAIN_FILES = {
  'train --workdir={in}/a_list': 'a_list/config.json',
  'train {tiny} --faulty_hosts=none/hosts': (
    '--faulty_hosts=none/hosts cannot be written: there is no folder none'
  ),
  'train {tiny} --workdir={in}/some/a.txt/run': 'cannot be written',
  'train {tiny} --workdir={in}/some/a.txt': 'some/a.txt',
  'train {tiny} --workdir=s3://bucket/run': 'neither a path',
  'train {tiny} --config.data.source=files:{in}/none/*.txt': '{in}/none/*.txt',
  'train {tiny} --config.data.source=wikipedia': 'wikipedia',
  'train {tiny} --config.data.source=tfds:none': 'none',
  'train {tiny} --config.data.tokenizer=none.json': 'none.json',
  'train {tiny} --config.data.cache_dir={in}/some/a.txt': 'some/a.txt',
  'train {tiny} --config.data.cache_dir=gs://b/c': 'gs://b/c',
  'train --config={repo}/configs/vit_digits.py --config.data.source=folder:none': 'none',
  'train {tiny} --config.init_from={in}/some': '{in}/some',
  'train {tiny} --config.init_from={lm}@77': '77',
  'train {tiny} --config.init_from={vit}': '{vit}',
  'train {tiny} --config.distill.teacher={in}/some': (
    'config.distill.teacher={in}/some: {in}/some is not the work directory of a run'
  ),
  'train {tiny} --config.distill.teacher={vit}': '{vit} is not a language model',
  'train {tiny} --workdir={lm} --config.model.pattern=layer*5': 'tokenformer grow --source=DIR',
}
