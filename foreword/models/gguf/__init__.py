"""GGUF files: their metadata, what it says of a model, and their tensors."""
