"""Triton kernels for CUDA GPUs that several operators share.

Without Triton only `launch` and `packed_layout` can be imported; `launch.why_unavailable()` gives the reason. Every kernel agrees with its
eager reference in Triton's interpreter, on an H100, and compiles for sm_80 and sm_90.
"""
