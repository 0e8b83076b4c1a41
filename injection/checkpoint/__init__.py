"""Reading a checkpoint: its files, the mapping of keys to parameters, and the weight sources of operators."""
