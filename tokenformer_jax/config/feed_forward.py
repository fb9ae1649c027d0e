"""Feed-forward parts as values of a config: an MLP, routed experts, or none.

A Pattention (`config/pattention.py`) is a feed-forward part as well.
"""

from typing import Annotated, ClassVar, Literal

from tokenformer_jax.config.pattention import AddedTokens, NoProjectionConfig, PattentionConfig
from tokenformer_jax.config.section import Bool, Float, Int, OneOf, key, section, table


@section
class MLPConfig:
  """φ(x W₁) W₂: the Transformer's, with GELU as φ; or, gated, (φ(x W₃) ⊙ x W₁) W₂.

  Parameter tokens can be beside it, and beside each of its matrices: Σ_g Θ_g(x K_gᵀ) V_g is added.
  """

  kind: ClassVar[str] = 'mlp'

  width: Int = key(0, 'F, the width between the two matrices. 0: 4 · model.width', least=0)
  bias: Bool = key(False, 'add a bias to every product')
  activation: Literal['gelu', 'gelu_tanh', 'relu', 'silu'] = key(
    'gelu', 'φ: the exact GELU, its approximation by tanh, ReLU, or SiLU'
  )
  gated: Bool = key(False, 'multiply by a gate φ(x W₃); with SiLU this is SwiGLU')
  beside: AddedTokens = key(
    NoProjectionConfig(), 'parameter tokens whose output is added to that of the MLP'
  )
  each: AddedTokens = key(
    NoProjectionConfig(), 'parameter tokens beside each matrix, whose output is added to its own'
  )


@section
class NoFeedForwardConfig:
  """A layer that is a mixer alone."""

  kind: ClassVar[str] = 'none'


@section
class RouterConfig:
  """The router of each token to its K largest gates (ties: the lowest expert index)."""

  gates: Literal['softmax', 'sigmoid'] = key('softmax', 'of the products of input and router')
  top_k: Int = key(1, 'K, the experts of a token', above=0)
  renormalize: Bool = key(False, 'divide the K gates by their sum; needs top_k of at least 2')
  jitter: Float = key(
    0.0, 'ε: training multiplies the input by random numbers of 1 ± ε', least=0, below=1
  )
  z_loss: Float = key(
    0.0, 'weight of the mean square of the log-sum-exp of the products (ST-MoE)', least=0
  )
  dtype: Literal['float32', 'bfloat16'] = key(
    'float32',
    'of products and gates. bfloat16 is for comparison only: training diverges (Switch, Table 2)',
  )


@section
class NoBalanceConfig:
  """Nothing balances the load."""

  kind: ClassVar[str] = 'none'


@section
class LossBalanceConfig:
  """weight · E · Σ f P, with the share f of choices and the mean gate P of each expert.

  It is the loss of the Switch Transformer (eq. 4), and of DeepSeekMoE with α₁ and α₂ (eq. 12, 15).
  """

  kind: ClassVar[str] = 'loss'

  weight: Float = key(0.01, 'α₁', least=0)
  over: Literal['sequence', 'batch'] = key(
    'sequence', 'f and P are means over a sequence, or over the batch'
  )
  devices: Int = key(
    1, 'groups of equally many experts, which device_weight balances as well', above=0
  )
  device_weight: Float = key(0.0, 'α₂, of the same loss over the groups of devices', least=0)


@section
class BiasBalanceConfig:
  """A bias for the choice, moved after each step against the load (Wang et al. 2024).

  Gates are without it (arXiv 2408.15664, algorithm 1).
  """

  kind: ClassVar[str] = 'bias'

  rate: Float = key(0.001, 'u, by which the bias moves against the sign of the excess', above=0)


_Balances = LossBalanceConfig | BiasBalanceConfig | NoBalanceConfig
Balance = Annotated[_Balances, OneOf(table(_Balances))]


@section
class CapacityConfig:
  """Each expert has places for a number of tokens of a sequence; it skips the others.

  Switch Transformer, eq. 3. Whether a token has a place does not depend on the mesh, on padding or
  on other sequences. Decoding token by token drops none.
  """

  kind: ClassVar[str] = 'capacity'

  factor: Float = key(1.25, 'places of an expert, in K · tokens / E, in training', above=0)
  eval_factor: Float = key(2.0, 'the same in evaluation', above=0)
  least: Int = key(4, 'the least number of places', least=0)


@section
class GroupedConfig:
  """Every token gets all its experts: tokens are sorted, and products grouped by expert."""

  kind: ClassVar[str] = 'grouped'

  device_factor: Float = key(
    0.0,
    'on several devices with mesh.experts: places that a device has for the tokens of another one, '
    'in those at even load; tokens beyond get nothing. 0: as many as there can be',
    least=0,
  )


_Dispatches = CapacityConfig | GroupedConfig
_Experts = MLPConfig | PattentionConfig
_SharedExperts = PattentionConfig | MLPConfig | NoFeedForwardConfig
Dispatch = Annotated[_Dispatches, OneOf(table(_Dispatches))]
Expert = Annotated[_Experts, OneOf(table(_Experts))]
SharedExpert = Annotated[_SharedExperts, OneOf(table(_SharedExperts))]


@section
class ExpertsConfig:
  """Experts that a router chooses for each token, beside a part that all tokens use.

  y = shared(x) + Σ_k g_k expert_k(x). With Pattention as both it is a sparse Pattention: groups of
  parameter tokens, each with its own norm.
  """

  kind: ClassVar[str] = 'experts'

  count: Int = key(8, 'E, the experts that the router chooses from', above=0)
  expert: Expert = key(MLPConfig(), 'each expert')
  shared: SharedExpert = key(
    NoFeedForwardConfig(),
    'the part for all tokens. K_s shared experts of width F are one MLP of width K_s · F',
  )
  router: RouterConfig = RouterConfig()
  balance: Balance = key(LossBalanceConfig(), 'what keeps the load of experts even')
  dispatch: Dispatch = key(GroupedConfig(), 'how tokens get to experts')
  shared_gate: Bool = key(
    False, 'multiply the part for all tokens by a learned sigmoid(x w), as in Qwen2-MoE'
  )


_FeedForwards = PattentionConfig | MLPConfig | ExpertsConfig | NoFeedForwardConfig
FeedForward = Annotated[_FeedForwards, OneOf(table(_FeedForwards))]
