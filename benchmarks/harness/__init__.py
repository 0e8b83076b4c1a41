"""What the benchmarks share: rounds, results with their provenance, peers in processes of their own, random models, simulated machines."""
