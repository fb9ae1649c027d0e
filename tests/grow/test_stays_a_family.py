"""A grown model of a family of the hub is one of that family, unless it has parameter tokens."""

import hub_folders
import pytest

from tokenformer_jax.config import ExpertsConfig, growth, matrices, pattern
from tokenformer_jax.convert import families
from tokenformer_jax.grow import plan

NOTHING = dict.fromkeys(('width', 'heads', 'ffn_width'))


def _larger(model, method='group', *, tokens=None, more=None, layers=None, **sizes):
  """The model that `grow` makes with these arguments, which must be possible."""
  how = growth(method=method)
  target = plan.larger_model(model, how, tokens, NOTHING | sizes, more, None, layers)
  plan.check(model, target, how)
  return target


@pytest.mark.parametrize('kind', families.FAMILIES)
def test_depth_and_widths_keep_the_family_and_tokens_do_not(kind):
  model = hub_folders.model(kind)
  twice = ' '.join(pattern.names(model.repeats) * 2)
  larger = [_larger(model, layers=twice), _larger(model, 'net2net', width=2 * model.width)]
  if not (isinstance(ffn := model.layer.ffn, ExpertsConfig) and ffn.shared.kind != 'none'):
    larger.append(_larger(model, 'neurons', ffn_width=96))
  matched = [families.match(one) for one in larger]
  assert [found and found[0].kind for found in matched] == [kind] * len(larger)
  tokens = {matrices(model)[0]: 8}
  assert families.match(_larger(model, tokens=tokens)) is None
