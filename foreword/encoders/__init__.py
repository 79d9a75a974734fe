"""Encoders of the BERT family: texts as vectors, and pairs of texts as scores. In a process of their own when served."""
