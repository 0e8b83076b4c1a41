"""What the benchmarks share: rounds, results with their provenance, peers in processes of their own, random models, simulated machines."""

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parents[2] / "tests")  # whose `support` has emulated devices, tiny models and searches for optima
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)
