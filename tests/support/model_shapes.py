"""The model shapes of the benchmarks."""

from support import import_benchmark

MODELS = import_benchmark("_model_shapes").MODELS
