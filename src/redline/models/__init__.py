"""Architectures and weight loading.

The models do not depend on the ladder (the search for optimizations), which treats them like users' models.
"""

# The `model_type` in the config.json of a Titans model; defined here so that reading it does not import torch.compile.
MEMORY_MODEL = "redline_memory"
