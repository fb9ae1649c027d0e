"""The cost of splash attention by formula."""

from tokenformer_jax.plan import kernel_costs


def _cost(name, *operands):
  scope = 'jit(f)/splash_window_0/splash_mha/pallas_call'
  return kernel_costs.splash_cost(name, operands, side=128, scope=scope)


def test_the_cost_counts_the_blocks_that_are_computed():
  queries = ('bf16', (3, 2, 2048, 96))
  dense = _cost('splash_mha_fwd_residuals.3', queries)
  causal = _cost('splash_mha_fwd_residuals.3', ('s8', (1, 2, 2)), queries)
  assert dense[0] == 2 * 2 * 3 * 2 * 2048**2 * 96, 'two products'
  assert dense[1] == dense[0] * 128 / 96, 'heads are filled up to 128'
  assert causal[0] == dense[0] * 3 / 4, 'of 2 × 2 blocks one is all masked'
  row = ('f32', (2, 2048, 96))
  assert 3 * _cost('splash_mha_fwd_residuals.3', row)[0] == dense[0], 'of 3 rows'
  table = ('s8', (1, 4, 4))
  one, two = (_cost(f'splash_mha_{name}.3', table, queries)[0] for name in ('dkv', 'fwd'))
  assert one / two == 5 / 2, 'one kernel computes all gradients'
  assert _cost('gmm.1', queries) is None


def test_a_mask_of_which_the_program_says_nothing_has_no_cost():
  queries, table = ('bf16', (3, 2, 2048, 96)), ('s8', (1, 4, 4))
  cost = kernel_costs.splash_cost(
    'splash_mha_dkv.3', [table, queries], side=128, scope='jit(f)/pallas_call'
  )
  assert cost is None, 'a window is made up'
