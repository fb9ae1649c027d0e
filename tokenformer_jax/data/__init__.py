"""Sources of text and images, tokenizers, the token store, and batches by step number."""
