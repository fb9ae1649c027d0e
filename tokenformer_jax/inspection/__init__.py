"""What the parameter tokens of a trained model answer to, and which are used."""
