"""Settings of an optimizer whose rates stand still, so that a test sees one factor at a time."""

STEADY = {
  'learning_rate': 0.01,
  'warmup_steps': 0,
  'schedule': 'constant',
  'new_token_warmup': 0,
}
OLD = 3  # tokens of an array before its growth
