"""Mixers other than plain softmax attention, and the variants of its queries, keys and values."""
