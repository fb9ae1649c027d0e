"""Show what the parameter tokens of a trained model respond to, and which of them are used."""
