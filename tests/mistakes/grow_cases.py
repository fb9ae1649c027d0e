"""Mistakes in growing: see cases.py for the names in braces."""

GROW = {
  'no source to grow': ('grow --target=new', '--source is missing'),
  'no target': ('grow --source={lm} --param_tokens=ffn=128', '--target is missing'),
  'a target that is there': ('grow --source={lm} --target={in}/some', '{in}/some exists'),
  'fewer tokens': (
    'grow --source={lm} --target=new --param_tokens=ffn=8',
    'growth only adds (tokenformer grow shrink drops the least important ones)',
  ),
  'a misspelt command': ('grow shrnk --source={lm} --target=new', "unknown command 'shrnk'"),
  'fewer layers': ('grow --source={lm} --target=new --layers=1', '--layers is 1'),
  'layers of no name': ("grow --source={lm} --target=new --pattern='lyer*4'", 'did you mean'),
  'layers said twice': ('grow --source={lm} --target=new --layers=4 --pattern=layer*4', 'one of'),
  'layers to shrink': (
    'grow shrink --source={lm} --target=new --layers=4',
    'no meaning for shrink',
  ),
  'noise for tokens that are not copies': (
    'grow --source={lm} --target=new --param_tokens=ffn=128 --noise=0.1',
    'noise=0.1 is for copies',
  ),
  'tokens of no name': (
    'grow --source={lm} --target=new --param_tokens=384',
    '--param_tokens is 384 without a name; write NAME=384 with one of the names qkv, proj, ffn',
  ),
  'first tokens of no name': (
    'grow --source={dense} --target=new --param_tokens=16',
    'with one of the names qkv, proj, ffn',
  ),
  'a mesh of no name': (
    'grow --source={lm} --target=new --param_tokens=ffn=128 --mesh=4',
    "--mesh names ''; known names: ",
  ),
  'copies of keys where there are none': (
    'grow --source={dense} --target=new --param_tokens=qkv=16,ffn=16 --new_keys=copies --noise=0.1',
    'new_keys=copies is for new tokens of a projection that has some',
  ),
  'a scale to keep where there is none': (
    'grow --source={dense} --target=new --param_tokens=ffn=16 --scale=keep',
    'scale has no meaning for method=group; it has new_keys, new_values, new_score, noise',
  ),
  'tokens in words': ('grow --source={lm} --target=new --param_tokens=ffn=more', 'ffn=N'),
  'empty tokens': (
    'grow --source={lm} --target=new --param_tokens=',
    "--param_tokens has ''; it must be NAME=N, an integer (new counts: qkv=N,proj=N",
  ),
  'tokens of a kind twice': (
    'grow --source={lm} --target=new --param_tokens=ffn=128,ffn=256',
    'ffn',
  ),
  'more tokens than there is memory for': (
    'grow --source={lm} --target=new --param_tokens=ffn=2000000000',
    'memory',
  ),
  'keys of new tokens for a method that draws none': (
    'grow --source={lm} --target=new --param_tokens=ffn=128 --method=duplicate --new_keys=trained',
    'new_keys has no meaning for method=duplicate; it has scale, noise',
  ),
  'a rate without bounds to grow with': (
    'grow --source={lm} --target=new --param_tokens=ffn=128 --rate=1e9',
    '--rate is 1000000000.0; it must be less than or equal to 100',
  ),
  'a target to print groups into': (
    'grow groups --source={lm} --target=new',
    '--target has no meaning for groups; leave it out',
  ),
  'texts at a time of a single one': (
    'generate --source={lm} --batch_size=4',
    '--batch_size has an effect only with --requests',
  ),
  'the likeliest of the likeliest': (
    'generate --source={lm} --temperature=0 --top_k=4',
    '--top_k has no effect with --temperature=0',
  ),
  'examples of tasks for a text': (
    'evaluate --source={lm} --text=files:{in}/corpus/*.txt --num_fewshot=2',
    '--num_fewshot has an effect only with --tasks',
  ),
  'a width for tokens': ('grow --source={lm} --target=new --width=64', '--width'),
  'neurons by a width': (
    'grow --source={dense} --target=new --method=neurons --width=64',
    'method=neurons needs --ffn_width=N, and keeps the width and the heads',
  ),
  'a method that widens and no width': (
    'grow --source={dense} --target=new --method=neurons',
    'nothing would grow; method=neurons needs --ffn_width=N',
  ),
  'neurons by tokens': ('grow --source={dense} --target=new --ffn_width=256', 'choose neurons'),
  'tokens for a Transformer': (
    'grow --source={dense} --target=new --method=net2net --param_tokens=ffn=128',
    '--param_tokens',
  ),
  'tokens by the method of tokens for a Transformer': (
    'grow --source={dense} --target=new --param_tokens=ffn=128 --method=zero_keys',
    '',
  ),
  'a merge of no run': ('grow merge --source={lm} --target=new --added=none', 'none is not'),
  'a group that is not there': (
    'grow remove --source={lm} --target=new --groups=2',
    '--groups names group 2',
  ),
  'a range of groups': (
    'grow remove --source={lm} --target=new --groups=1-2',
    "--groups has '1-2'; it must be a valid integer (the groups, as 2,3, counted from 1)",
  ),
  'the only group': ('grow remove --source={lm} --target=new --groups=1', 'must keep one'),
  'groups to freeze that are not there': (
    'grow freeze --source={lm} --target=new --groups=2',
    '--groups names group 2',
  ),
  'nothing to extract': ('grow extract --source={lm} --target=new', '{lm}'),
  'nothing to take out': ('grow remove --source={lm} --target=new', '{lm}'),
  'a shrinking to more': ('grow shrink --source={lm} --target=new --param_tokens=ffn=128', 'ffn'),
  'a start after the last step': (
    'train {tiny} --workdir=new --config.init_from={lm} --config.train.steps=2 '
    '--config.model.layer.mixer.positions.fraction=0.25',
    'where the run would go on, and config.train.steps is 2; raise it, or',
  ),
}
