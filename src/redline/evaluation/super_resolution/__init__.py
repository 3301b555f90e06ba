"""What training and judging of super-resolution share: the field's bicubic, its scores, its test sets."""

from redline.datasets.bicubic import resize, resize_to, to_8_bits
from redline.evaluation.super_resolution.evaluate import Evaluation, bicubic_model, enlarge, evaluate
from redline.evaluation.super_resolution.pairs import PairFiles, find_pairs
from redline.evaluation.super_resolution.scores import Scores, score

__all__ = [
    "Evaluation",
    "PairFiles",
    "Scores",
    "bicubic_model",
    "enlarge",
    "evaluate",
    "find_pairs",
    "resize",
    "resize_to",
    "score",
    "to_8_bits",
]
