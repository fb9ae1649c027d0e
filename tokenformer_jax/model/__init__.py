"""The models: parameters, products with them, layers, and the language and vision models."""
