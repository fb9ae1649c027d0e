"""Train TokenFormer models and grow them without changing what they compute.

The modules are the interface; importing the package imports none of them, so it is fast:

  config      what a run is                    lm           the language model
  train       training runs                    pattention   attention to parameter tokens
  generate    text from a trained model        sharding     meshes and where arrays live
  plot        loss curves                      checkpoint   reading and writing checkpoints
  grow        larger models from trained ones  inspect      what parameter tokens answer to
  tasks       text and images in a run         vit          the vision transformer
  evaluate    tasks, and perplexity of texts   trained      a run, read for use
  plan        runs on TPUs that are not here
"""
