"""Tasks that show whether a model remembers: pairs to recall, and needles in long noise."""

from redline.recall.evaluate import LossRow, RecallRow, evaluate, loss_by_position
from redline.recall.mqar import Mqar
from redline.recall.needle import Needle
from redline.recall.passkey import Passkey
from redline.recall.task import Recall, Sample, accuracy
from redline.recall.tasks import describe, make_task, task_in

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
