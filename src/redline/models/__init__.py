"""Architectures only: they know nothing of the ladder, and any of them could be a user's own."""
