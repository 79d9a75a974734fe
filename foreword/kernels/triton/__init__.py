"""Kernels for NVIDIA GPUs, one file an operation; importing a module of it needs Triton."""
