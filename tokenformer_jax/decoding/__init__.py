"""A trained model in use: text that it writes, and scores that it gives."""
