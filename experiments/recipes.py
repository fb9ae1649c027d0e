"""Name the shapes, scales and recipes of experiments/mixing.py."""

import dataclasses
from pathlib import Path
from typing import Any

import growth

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig

SEEDS = (0, 1, 2)
SAMPLES = 8 * 61_440  # of each seed's order in the file of the text
DECAY = 0.2  # the share of D
TOKENS = 512  # in a step
RATES = (1.0, 0.5, 0.25)  # of arms, in rates of the scale
POINTS, EARLY = (0.25, 0.5, 0.75), (0.025, 0.05, 0.1)
# Shapes: layers × groups of as many tokens as the width. In `3+1x2` the last layer has a name of
# its own. With `u` the tokens are one group, and with `t` it is a Transformer whose matrices have
# so many times as many parameters, by its width.
LARGE = '4x2'
SMALL = '2x1'
DEEP = '8x2'
FAMILY = ('1x1', '2x1', '2x2', '4x2')  # sizes, each with twice the parameters of the one before
SMALL_TRANSFORMER = 't2x1'
# What large models from scratch the controls are compared with.
CONTROL_SHAPES = (SMALL_TRANSFORMER, 't2x4', 't8x1', '8x1', '2x4u')
BY_TOKENS = ('2x1', '2x2', '2x4')
# Where the trunk of a family grows to each of its sizes.
FAMILIES = {
  'family': (0.0, 1 / 6, 1 / 3, 1 / 2),
  'late family': (0.0, 1 / 4, 1 / 2, 3 / 4),
  'early and late family': (0.0, 0.1, 0.65, 0.775),  # about the best at `large`, by the law
}


@dataclasses.dataclass(frozen=True)
class Scale:
  """A scale of `growth.SCALES`.

  Attributes:
    parameters: of the layers of the large model.
    rate: of the trunk.
    main: the length D at which recipes are compared.
    lengths: of the large model from scratch.
    chunk: the steps between two looks at the members.
    slots: the most members of a program.
    recipes: those that are tried; None: all.
  """

  parameters: int
  rate: float
  main: int
  lengths: tuple[int, ...]
  chunk: int = 128
  slots: int = 32
  recipes: tuple[str, ...] | None = None

  def steps(self, length: float) -> int:
    """Return the steps of a length, in whole chunks."""
    return round(length * self.parameters / TOKENS / self.chunk) * self.chunk


_AT_LARGE = ('no decay of weights after', 'layers halved, no decay after')
SCALES = {
  'tiny': Scale(2**15, 4e-3, 20, (10, 20, 40), chunk=32, slots=12),
  'small': Scale(2**17, 4e-3, 60, (20, 40, 60, 90), slots=64),
  'large': Scale(2**19, 2e-3, 20, (10, 20, 30), chunk=256, slots=16, recipes=_AT_LARGE),
}
TRUNK_RATES = (1.0, 0.5, 0.25, 2.0)  # times the scale's rate, of both sizes from scratch


@dataclasses.dataclass(frozen=True)
class Trunk:
  """A small model, until it grows."""

  shape: str = SMALL
  rate: float = 1.0
  decay: float = 0.1
  annealed: bool = False  # its rate decays before the growth, over the last fifth


AS_GROW, TAUGHT = GrowConfig(), 'taught'
TO_EIGHT = 'from one layer to eight (r = 16)'


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a model grows, and how the grown model trains; the defaults are those of `grow`."""

  trunk: Trunk = Trunk()
  grow: GrowConfig = AS_GROW
  edit: str = ''
  decay: float = 0.1
  batch: str = ''  # a suffix of the shape: 'b4' and 'b16' are half and twice the batch
  warmup: int = 0  # of all parameters after growth
  new: float = 1.0
  new_warmup: int = 100
  layers: float = 1.0
  falls: bool = False  # the rate falls from the growth on
  between: tuple[str, ...] = ()  # shapes on the way; growths are at equal parts of the point
  teacher: bool = False  # the model before growth teaches the grown one
  shape: str = LARGE  # that it grows to
  points: tuple[float, ...] = POINTS

  @property
  def small(self) -> str:
    """The shape of the small model that η and controls compare with."""
    return SMALL_TRANSFORMER if self.shape.startswith('t') else SMALL

  @property
  def large(self) -> str:
    """The shape of the large model that they compare with."""
    return LARGE if '+' in self.shape else self.shape


def _grow(**changes: Any) -> Recipe:
  return Recipe(grow=config_lib.growth(**changes))


def _widened(method: str) -> Recipe:
  # Copies need noise to part.
  grow = config_lib.growth(method, noise=0.01)
  return Recipe(trunk=Trunk(SMALL_TRANSFORMER), shape='t2x4', grow=grow)


RECIPES = {
  'default': Recipe(),
  'no decay of weights after': Recipe(decay=0.0),
  'layers halved, no decay after': Recipe(edit='half', warmup=100, decay=0.0),
  'layers halved': Recipe(edit='half', warmup=100),
  'no decay of weights always': Recipe(decay=0.0, trunk=Trunk(decay=0.0)),
  'all warmed again': Recipe(warmup=200, new_warmup=0),
  'trunk at half the rate': Recipe(trunk=Trunk(rate=0.5)),
  'from one layer (r = 4)': Recipe(trunk=Trunk('1x2')),
  'from one layer of half the tokens (r = 8)': Recipe(trunk=Trunk('1x1')),
  TO_EIGHT: Recipe(trunk=Trunk('1x1'), shape=DEEP),
  'layers live copies': _grow(place='whole_copies'),
  'rate falls from growth on': Recipe(falls=True),
  'values small': dataclasses.replace(_grow(new_values='init'), edit='small'),
  'keys back to first size': Recipe(edit='keys'),
  'layers drawn': _grow(place='between'),
  'moments dropped, warmed again': Recipe(
    warmup=200, new_warmup=0, grow=GrowConfig(moments='drop')
  ),
  'layers by depth (muP)': Recipe(layers=0.5**0.5),
  'keys like trained': _grow(new_keys='trained'),
  'new tokens ×2': Recipe(new=2.0),
  'new tokens ×4': Recipe(new=4.0),
  'new tokens ×0.25': Recipe(new=0.25),
  'decay of weights ×3 after': Recipe(decay=0.3),
  'decay of weights ×3 always': Recipe(decay=0.3, trunk=Trunk(decay=0.3)),
  'no warm-up of new tokens': Recipe(new_warmup=0),
  'trunk at twice the rate': Recipe(trunk=Trunk(rate=2.0)),
  'trunk annealed, warmed again': Recipe(trunk=Trunk(annealed=True), warmup=200, new_warmup=0),
  'values drawn': _grow(new_values='init'),
  'layers drawn, behind': _grow(place='behind'),
  'batch halved': Recipe(batch='b4'),
  'batch doubled': Recipe(batch='b16'),
  'depth only (r = 2)': Recipe(trunk=Trunk('2x2')),
  'tokens only (r = 2)': Recipe(trunk=Trunk('4x1')),
  'two growths': Recipe(between=('2x2',)),
  'three growths from one layer (r = 8)': Recipe(trunk=Trunk('1x1'), between=('2x1', '2x2')),
  'taught by the model before': Recipe(teacher=True),
  'keys by gradient': Recipe(edit='gradient'),
  'keys copied': _grow(new_keys='copies'),
  'all new layers behind the first': Recipe(trunk=Trunk('1+1x1'), shape='3+1x2'),
  'all new layers behind the last': Recipe(trunk=Trunk('1+1x1'), shape='1+3x2'),
  'copied layers alone': Recipe(shape='8x1'),
  'as released': Recipe(shape='2x4u', grow=config_lib.growth('random', moments='drop')),
  'Transformer, copied layers': Recipe(trunk=Trunk(SMALL_TRANSFORMER), shape='t8x1'),
  'Transformer, net2net': _widened('net2net'),
  'Transformer, hypercloning': _widened('hypercloning'),
}
CONTROLS = tuple(name for name, recipe in RECIPES.items() if recipe.shape in CONTROL_SHAPES)


def config(name: str, dtype: str = 'float32') -> Config:
  """Return the config of the runs of a shape, such as `small 4x2 muon` or `small 4x2 adamw b16`.

  What differs between members is not in it. A shape that ends with `taught` has a teacher.
  """
  scale, shape, optimizer, *rest = name.split()
  deep, groups = shape.strip('tu').split('x')
  counts, groups = [int(count) for count in deep.split('+')], int(groups)
  layers = sum(counts)
  batch = int(rest[0].removeprefix('b')) if rest and rest[0] != TAUGHT else 8
  changes = {'optim__name': optimizer, 'data__batch_size': batch}
  changes |= {'optim__schedule': 'constant', 'dtype': dtype}
  changes |= {'train__remat': 'everything', 'train__layers': 'unrolled', 'train__attention': 'xla'}
  if len(counts) > 1:
    changes |= {
      'model__variants': {'last': {}},
      'model__pattern': f'layer*{counts[0]} last*{counts[1]}',
    }
  one = dataclasses.replace(growth.SCALES[scale], layers=1)
  kind = 'transformer' if shape.startswith('t') else 'tokenformer'
  grouped = kind == 'tokenformer' and groups > 1 and not shape.endswith('u')
  size = growth.Size(groups, layers, groups if grouped else 0)
  return growth.Plan(Path(), one, SEEDS).config(kind, size, 0, 1, **changes)
