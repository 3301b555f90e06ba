"""Tasks that show whether a model remembers: pairs to recall, and needles in long noise."""

from redline.recall.mqar import Mqar
from redline.recall.needle import Needle
from redline.recall.passkey import Passkey
from redline.recall.task import Recall, Sample, accuracy

__all__ = ["Mqar", "Needle", "Passkey", "Recall", "Sample", "accuracy"]
