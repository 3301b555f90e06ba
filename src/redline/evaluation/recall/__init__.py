"""Recall tasks for language models: associative pairs, and needles in long texts."""

from redline.evaluation.recall.evaluate import LossRow, RecallRow, evaluate, loss_by_position
from redline.evaluation.recall.mqar import Mqar
from redline.evaluation.recall.needle import Needle
from redline.evaluation.recall.passkey import Passkey
from redline.evaluation.recall.task import Recall, Sample, accuracy
from redline.evaluation.recall.tasks import describe, make_task, task_in

__all__ = [
    "LossRow",
    "Mqar",
    "Needle",
    "Passkey",
    "Recall",
    "RecallRow",
    "Sample",
    "accuracy",
    "describe",
    "evaluate",
    "loss_by_position",
    "make_task",
    "task_in",
]
