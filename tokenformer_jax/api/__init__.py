"""Work with runs from Python: `import tokenformer_jax`."""
