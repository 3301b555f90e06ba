"""Evaluates super-resolution models: test sets, PSNR and SSIM as papers compute them, and the bicubic baseline."""

from redline.evaluation.super_resolution.evaluate import (
    Evaluation,
    ImageScores,
    bicubic_model,
    enlarge,
    evaluate,
    evaluate_super_resolution,
)
from redline.evaluation.super_resolution.pairs import find_pairs
from redline.evaluation.super_resolution.scores import score

__all__ = [
    "Evaluation",
    "ImageScores",
    "bicubic_model",
    "enlarge",
    "evaluate",
    "evaluate_super_resolution",
    "find_pairs",
    "score",
]
