"""Use a trained model: generate text, score text, and evaluate."""
