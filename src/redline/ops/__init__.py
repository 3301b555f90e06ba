"""Kernels, one folder each: `reference.py` is the specification in plain PyTorch, the rest is the same but faster."""
