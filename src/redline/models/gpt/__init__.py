"""A small GPT for training steps."""

from redline.models.gpt.model import GPT

__all__ = ["GPT"]
