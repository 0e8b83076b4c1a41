"""Triton kernels that leave out the neurons a token does not need.

P pairs of a token and one of its experts, T * K of them. Every kernel agrees with the eager reference in Triton's interpreter and compiles
for sm_80 and sm_90; none has run on a GPU yet.
"""
