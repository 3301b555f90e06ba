"""Measures how many held-out questions of each topic a chat model answers exactly."""

from redline.evaluation.talk.evaluate import Answered, Message, TalkRow, evaluate_answers, is_meaningful, rows_of, total

__all__ = ["Answered", "Message", "TalkRow", "evaluate_answers", "is_meaningful", "rows_of", "total"]
