"""Whether a live model stays what it is over a thousand frames: against its input, and against its own beginning."""

from redline.evaluation.drift.cases import CASES, Case, film_case, photo_cases
from redline.evaluation.drift.controls import CONTROLS
from redline.evaluation.drift.judgement import Finding, judge
from redline.evaluation.drift.watch import Watched, watch

__all__ = ["CASES", "CONTROLS", "Case", "Finding", "Watched", "film_case", "judge", "photo_cases", "watch"]
