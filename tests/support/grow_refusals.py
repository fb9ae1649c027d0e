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
  'no number': (['--param_tokens=ffn=many'], "has 'ffn=many'; it must be ffn=N"),
  'a superscript': (['--param_tokens=ffn=²'], "has 'ffn=²'; it must be ffn=N"),
  'a power of ten': (['--param_tokens=ffn=1e12'], "has 'ffn=1e12'; it must be ffn=N"),
  'a number without end': ([f'--param_tokens=ffn={"9" * 5000}'], '9….*; it must be ffn=N'),
  'a count twice': (['--param_tokens=ffn=96,ffn=128'], "--param_tokens names ffn twice, as 'ffn"),
  'an axis twice': ([LARGER, '--mesh=fsdp=1,fsdp=1'], '--mesh names fsdp twice'),
  'more than there is': (
    ['--param_tokens=qkv=2000000000'],
    r'take [\d,.]+ GiB of.*, where [\d.]+',
  ),
  'a wider one than there is': (
    ['--source={home}/dense', '--method=hypercloning', '--width=3200000'],
    r'take [\d,.]+ GiB of the memory of this host, where [\d.]+ GiB is free',
  ),
  'a width of zero': (['--source={home}/dense', '--method=net2net', '--width=0'], '--width is 0'),
  'no heads': (
    ['--source={home}/dense', '--method=net2net', '--width=64', '--heads=0'],
    '--heads is 0; it must be at least 1',
  ),
  'noise that is not a number': (
    ['--param_tokens=ffn=128', '--method=duplicate', '--noise=nan'],
    'noise is nan; it must be a finite number',
  ),
  'a seed without end': ([LARGER, '--seed=99999999999'], '--seed is 99999999999; it must be less'),
  'examples without end': (
    ['shrink', '--param_tokens=ffn=32', '--examples=99999999999'],
    '--examples is 99999999999; it must be less than 2147483648',
  ),
  'a target in the source': (['--target={home}/run/new', LARGER], 'lies in the source; choose'),
  'a target among the checkpoints': (
    ['--target={home}/run/checkpoints/30', LARGER],
    'lies in the source; choose',
  ),
  'a target that is the source': (['--target={home}/run', LARGER], 'the target .* exists'),
  'a name without end': ([f'--target={{home}}/{"x" * 300}', LARGER], 'cannot be made .File name'),
  'merging with itself': (['merge', '--added={home}/run'], 'merged, they would count twice'),
  'shrinking a Transformer': (
    ['shrink', '--source={home}/dense', '--param_tokens=ffn=32'],
    '--param_tokens counts parameter tokens, and this model has none',
  ),
  'a count of zero': (['--param_tokens=ffn=0'], 'has ffn=0; it must be at least 1'),
  'a count that is no index': (
    ['--param_tokens=qkv=99999999999'],
    'has qkv=99999999999; it must be less than 2147483648',
  ),
  'nothing': ([], 'nothing would grow; say what is to be larger'),
  'the same counts': (['--param_tokens=qkv=32,ffn=64'], 'nothing would grow'),
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
  'the wrong model, too': (
    ['--source={home}/dense', '--param_tokens=ffn=96', '--method=random'],
    'method random adds parameter tokens to others, and this model has none; choose group',
  ),
  'a width that heads do not divide': (
    ['--source={home}/dense', '--width=65', '--method=net2net_fill'],
    'give --heads=N as well',
  ),
  'an unknown action': (['grwo', LARGER], "unknown command 'grwo'; did you mean 'grow'"),
  'two actions': (['extract', 'remove'], "'remove' after 'extract' is one word too many"),
  'a flag of another action': (['extract', LARGER], '--param_tokens has no meaning for extract'),
  'examples to grow by': ([LARGER, '--examples=4'], '--examples has no meaning for grow'),
  'a seed to remove by': (['remove', '--seed=4'], '--seed has no meaning for remove'),
  'nothing to remove': (['remove'], 'nothing was added to'),
  'nothing to extract': (['extract'], 'nothing was added to'),
  'nothing to append': (['merge'], '--added is missing: the run whose tokens are appended'),
  'another width': (['merge', '--added={home}/dense'], r"qkv\.kind is 'pattention' in the source"),
  'no shrinking': (['shrink', '--param_tokens=ffn=96'], 'shrink cannot make 96 of them'),
  'shrinking to the same': (['shrink', '--param_tokens=ffn=64'], 'nothing would shrink'),
  'shrinking to nothing': (['shrink'], 'shrink needs either --param_tokens or --experts'),
  'an odd mesh': ([LARGER, '--mesh=fsdp=2'], 'number of devices, 1'),
  'an unknown axis': (
    [LARGER, '--mesh=data=1'],
    "--mesh names 'data'; known names: experts, fsdp, repl",
  ),
}
