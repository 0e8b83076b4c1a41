"""Activation sparsity inside experts: thresholds below which neurons count as zero, and the kernels' paths that skip them."""
