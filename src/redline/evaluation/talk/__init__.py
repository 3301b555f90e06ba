"""Exact answers to held-out questions, by topic."""

from redline.evaluation.talk.evaluate import Answered, Message, TalkRow, evaluate_answers, is_meaningful, rows_of, total

__all__ = ["Answered", "Message", "TalkRow", "evaluate_answers", "is_meaningful", "rows_of", "total"]
