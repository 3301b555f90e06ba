"""Conversations written by code: an endless, seeded stream to train a small language model, and held-out questions."""

from redline.datasets.conversations.conversation import ASKED, Message, Question, conversation, question
from redline.datasets.conversations.draw import Draw

__all__ = ["ASKED", "Draw", "Message", "Question", "conversation", "question"]
