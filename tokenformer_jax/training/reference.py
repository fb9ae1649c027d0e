"""Find the reference of DPO in the run itself: the model without the groups that it trains."""

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.config.groups import adds_groups
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs.checkpoint_meta import Lineage
from tokenformer_jax.steps.last_growth import changes_of_tokens
from tokenformer_jax.tasks.preference import NO_REFERENCE


def model_before(config: Config, lineage: Lineage) -> ModelConfig | None:
  """Return the model before the last growth, if it is frozen in this one and got groups alone."""
  changes = changes_of_tokens(lineage)
  if config.optim.old_tokens != 'freeze' or not changes:
    return None
  growth = changes[-1]
  is_growth = growth.action in ('grow', 'merge') and adds_groups(growth.model, config.model)
  return growth.model if is_growth else None


def check(config: Config, before: ModelConfig | None) -> None:
  """Check that a run by DPO has a reference: a teacher, or the model `before` its growth."""
  needed = config.data.has_pairs and config.preference.loss == 'dpo'
  if needed and before is None and not config.distill.teacher:
    raise UserError(NO_REFERENCE)
