"""Triton kernels for NVIDIA GPUs; importing a module of this package needs Triton."""
