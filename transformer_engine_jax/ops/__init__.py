"""Kernels and differentiable ops, one noun a file; nothing here knows Flax."""
