"""Show what parameter tokens and experts of a trained model respond to, and which are used."""
