"""Checkpoints quantized with AWQ, GPTQ, compressed-tensors or in FP8."""
