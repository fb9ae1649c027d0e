"""Bring models in from the hub, adapters and released weights, and write them out."""
