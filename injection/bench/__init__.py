"""The benchmarks of a checkout, run by name, and one page of all their results. Wheels hold neither benchmarks nor results."""
