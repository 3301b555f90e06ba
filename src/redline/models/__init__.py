"""Architectures only: they know nothing of the ladder, and any of them could be a user's own."""

# The `model_type` of a memory model's folder: known here, since the model itself takes torch's compiler along.
MEMORY_MODEL = "redline_memory"
