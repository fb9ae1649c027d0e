"""Growths that the command refuses: its arguments, and what the sentence says."""

from grow_commands import LARGER

REFUSALS = {
  'an existing target': (
    ['--target={home}/dense', LARGER],
    'the target .* exists; name a new directory, nothing is overwritten',
  ),
  'a target that cannot be made': (['--target={home}/corpus/0.txt/x/y', LARGER], 'choose anoth'),
  'no run': (['--source={home}/nothing', LARGER], 'is not the work directory of a run'),
  'no such step': (['--source={home}/run@7', LARGER], 'has no checkpoint of step 7; it has the st'),
  'a source that ends oddly': (['--source={home}/run@new', LARGER], 'give DIR or DIR@STEP'),
  'an unknown kind': (['--param_tokens=fnn=128'], "names 'fnn'; did you mean 'ffn'"),
  'a count twice': (['--param_tokens=ffn=96,ffn=128'], "--param_tokens names ffn twice, as 'ffn"),
  'more than there is': (
    ['--param_tokens=qkv=2000000000'],
    r'take [\d,.]+ GiB of.*, where [\d.]+',
  ),
  'a wider one than there is': (
    ['--source={home}/dense', '--method=hypercloning', '--width=3200000'],
    r'take [\d,.]+ GiB of the memory of this host, where [\d.]+ GiB is free',
  ),
  'noise that is not a number': (
    ['--param_tokens=ffn=128', '--method=duplicate', '--noise=nan'],
    'noise is nan; it must be a finite number',
  ),
  'a target in the source': (['--target={home}/run/new', LARGER], 'lies in the source; choose'),
  'merging with itself': (['merge', '--added={home}/run'], 'merged, they would count twice'),
  'shrinking a Transformer': (
    ['shrink', '--source={home}/dense', '--param_tokens=ffn=32'],
    '--param_tokens counts parameter tokens, and this model has none',
  ),
  'a count of zero': (['--param_tokens=ffn=0'], 'has ffn=0; it must be at least 1'),
  'nothing': ([], 'nothing would grow; say what is to be larger'),
  'a smaller count': (
    ['--param_tokens=ffn=32'],
    'ffn has 64 parameter tokens in the source, and 32 are fewer',
  ),
  'no multiple': (
    ['--param_tokens=ffn=96', '--method=duplicate'],
    'ffn=96 is not a multiple of the',
  ),
  'values that a method does not choose': (
    [LARGER, '--method=zero_keys', '--new_values=zero'],
    'new_values has no meaning for method=zero_keys; it has scale',
  ),
  'width by tokens': (['--width=64'], '--width is for the methods that widen a Transformer'),
  'tokens by width': ([LARGER, '--method=net2net'], '--param_tokens is not for method=net2net'),
  'the wrong model': (['--width=64', '--method=net2net'], 'method net2net is for Transformers'),
  'a width that heads do not divide': (
    ['--source={home}/dense', '--width=65', '--method=net2net_fill'],
    'give --heads=N as well',
  ),
  'an unknown action': (['grwo', LARGER], "unknown command 'grwo'; did you mean 'grow'"),
  'a flag of another action': (['extract', LARGER], '--param_tokens has no meaning for extract'),
  'a seed to remove by': (['remove', '--seed=4'], '--seed has no meaning for remove'),
  'nothing to remove': (['remove'], 'nothing was added to'),
  'nothing to append': (['merge'], '--added is missing: the run whose tokens are appended'),
  'another width': (['merge', '--added={home}/dense'], r"qkv\.kind is 'pattention' in the source"),
  'no shrinking': (['shrink', '--param_tokens=ffn=96'], 'shrink cannot make 96 of them'),
  'shrinking to nothing': (['shrink'], 'shrink needs either --param_tokens or --experts'),
  'an odd mesh': ([LARGER, '--mesh=fsdp=2'], 'number of devices, 1'),
  'an unknown axis': (
    [LARGER, '--mesh=data=1'],
    "--mesh names 'data'; known names: experts, fsdp, repl",
  ),
}
