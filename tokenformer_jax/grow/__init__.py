"""Grow a trained model without changing what it computes."""
