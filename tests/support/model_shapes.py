"""The model shapes of the benchmarks."""

from support import import_benchmark

MODELS = import_benchmark("harness.routing").MODELS
