"""Data: sources of text, tokenizers, the token store, and batches as a function of the step."""
