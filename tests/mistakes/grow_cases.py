"""Mistakes in growing: see cases.py for the names in braces."""

GROW = {
  'grow --target=new': '--source is missing',
  'grow --source={lm} --param_tokens=ffn=128': '--target is missing',
  'grow --source={lm} --target={in}/some': '{in}/some exists',
  'grow --source={lm} --target=new --param_tokens=ffn=8': (
    'growth only adds (tokenformer grow shrink drops the least important ones)'
  ),
  'grow shrnk --source={lm} --target=new': "unknown command 'shrnk'",
  'grow --source={lm} --target=new --layers=1': '--layers is 1',
  "grow --source={lm} --target=new --pattern='lyer*4'": 'did you mean',
  'grow --source={lm} --target=new --layers=4 --pattern=layer*4': 'one of',
  'grow shrink --source={lm} --target=new --layers=4': 'no meaning for shrink',
  'grow --source={lm} --target=new --param_tokens=ffn=128 --noise=0.1': 'noise=0.1 is for copies',
  'grow --source={lm} --target=new --param_tokens=384': (
    '--param_tokens is 384 without a name; write NAME=384 with one of the names qkv, proj, ffn'
  ),
  'grow --source={dense} --target=new --param_tokens=16': 'with one of the names qkv, proj, ffn',
  'grow --source={lm} --target=new --param_tokens=ffn=128 --mesh=4': (
    "--mesh names ''; known names: "
  ),
  'grow --source={dense} --target=new --param_tokens=qkv=16,ffn=16 --new_keys=copies --noise=0.1': (
    'new_keys=copies is for new tokens of a projection that has some'
  ),
  'grow --source={dense} --target=new --param_tokens=ffn=16 --scale=keep': (
    'scale has no meaning for method=group; it has new_keys, new_values, new_score, noise'
  ),
  'grow --source={lm} --target=new --param_tokens=ffn=more': 'ffn=N',
  'grow --source={lm} --target=new --param_tokens=': (
    "--param_tokens has ''; it must be NAME=N, an integer (new counts: qkv=N,proj=N"
  ),
  'grow --source={lm} --target=new --param_tokens=ffn=128,ffn=256': 'ffn',
  'grow --source={lm} --target=new --param_tokens=ffn=2000000000': 'memory',
  'grow --source={lm} --target=new --param_tokens=ffn=128 --method=duplicate --new_keys=trained': (
    'new_keys has no meaning for method=duplicate; it has scale, noise'
  ),
  'grow --source={lm} --target=new --param_tokens=ffn=128 --rate=1e9': (
    '--rate is 1000000000.0; it must be less than or equal to 100'
  ),
  'grow groups --source={lm} --target=new': '--target has no meaning for groups; leave it out',
  'generate --source={lm} --batch_size=4': '--batch_size has an effect only with --requests',
  'generate --source={lm} --temperature=0 --top_k=4': '--top_k has no effect with --temperature=0',
  'evaluate --source={lm} --text=files:{in}/corpus/*.txt --num_fewshot=2': (
    '--num_fewshot has an effect only with --tasks'
  ),
  'grow --source={lm} --target=new --width=64': '--width',
  'grow --source={dense} --target=new --method=neurons --width=64': (
    'method=neurons needs --ffn_width=N, and keeps the width and the heads'
  ),
  'grow --source={dense} --target=new --method=neurons': (
    'nothing would grow; method=neurons needs --ffn_width=N'
  ),
  'grow --source={dense} --target=new --ffn_width=256': 'choose neurons',
  'grow --source={dense} --target=new --method=net2net --param_tokens=ffn=128': '--param_tokens',
  'grow --source={dense} --target=new --param_tokens=ffn=128 --method=zero_keys': '',
  'grow merge --source={lm} --target=new --added=none': 'none is not',
  'grow remove --source={lm} --target=new --groups=2': '--groups names group 2',
  'grow remove --source={lm} --target=new --groups=1-2': (
    "--groups has '1-2'; it must be a valid integer (the groups, as 2,3, counted from 1)"
  ),
  'grow remove --source={lm} --target=new --groups=1': 'must keep one',
  'grow freeze --source={lm} --target=new --groups=2': '--groups names group 2',
  'grow extract --source={lm} --target=new': '{lm}',
  'grow remove --source={lm} --target=new': '{lm}',
  'grow shrink --source={lm} --target=new --param_tokens=ffn=128': 'ffn',
  'train {tiny} --workdir=new --config.init_from={lm} --config.train.steps=2 '
  '--config.model.layer.mixer.positions.fraction=0.25': (
    'where the run would go on, and config.train.steps is 2; raise it, or'
  ),
}
