"""One step of training, compiled: the optimizer, the step, and the options of the compiler."""
