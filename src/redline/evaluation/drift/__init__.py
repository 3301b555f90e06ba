"""Measures whether a live model stays stable over a thousand frames, relative to its input and to its own start."""

from redline.evaluation.drift.case_run import CaseRun, run_case
from redline.evaluation.drift.cases import CASES, CONTROLS, Case, photo_cases, video_case
from redline.evaluation.drift.findings import Finding, judge

__all__ = ["CASES", "CONTROLS", "Case", "CaseRun", "Finding", "judge", "photo_cases", "run_case", "video_case"]
