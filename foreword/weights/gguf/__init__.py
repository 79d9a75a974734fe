"""GGUF files: metadata, model config and tensors."""
