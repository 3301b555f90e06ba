"""Objectives: decide whether one plan is better than another, and say why.

The climb, its ablation, the final race, `verify` and `bench --compare` all use these rules. Latency, its 99th
percentile, throughput and the rate of concurrent requests are sampled differently but judged in the same way: by speed
first, then, among equally fast plans, by memory. The memory objective compares memory peaks first, and speed if the
peaks are equal. With a memory limit, a plan within the limit is always better than one above it.
"""

from dataclasses import dataclass
from enum import StrEnum

from redline.errors import RedlineError
from redline.ladder.statistics import Interval
from redline.notation import format_bytes

# A rung with a smaller gain is dropped: two processes that run the same code can differ by that much.
WORTHWHILE = 1.01
# The margin in the final race, and in `verify` against eager: every gain that is larger than the noise counts.
ANY = 1.0
# A plan that saves memory counts as equally fast if its speed ratio is above this value.
NOT_SLOWER = 0.97
# A memory peak counts as smaller than another plan's peak if their ratio is below `SMALLER`, and as much smaller if it
# is below `_MUCH_SMALLER`. CUDA counts bytes exactly; on a CPU the resident size of a process varies by up to 14% for
# the same plan.
SMALLER = {"cuda": 0.98, "cpu": 0.85}
_MUCH_SMALLER = {"cuda": 0.9, "cpu": 0.8}
# Between two runs the machine drifts more than between turns of one run, so `change` ignores differences below this.
_DRIFT = 0.05
_DRIFT_BYTES = {"cuda": 0.05, "cpu": 0.25}


@dataclass(frozen=True)
class Comparison:
    """Speed and peak memory of a candidate, compared with the incumbent plan that it has to beat."""

    ratio: Interval  # how many times faster the candidate is
    candidate_bytes: int
    incumbent_bytes: int
    device: str  # "cpu", "cuda", "cuda:1" …
    # The most peak memory, in bytes, that the plan of a climb may use; 0 for no limit.
    limit_bytes: int = 0

    @property
    def kind(self) -> str:
        return kind_of_device(self.device)

    @property
    def fits(self) -> bool:
        return is_within(self.candidate_bytes, self.limit_bytes)

    @property
    def incumbent_fits(self) -> bool:
        return is_within(self.incumbent_bytes, self.limit_bytes)

    @property
    def smaller(self) -> bool:
        return self.candidate_bytes < SMALLER[self.kind] * self.incumbent_bytes

    @property
    def larger(self) -> bool:
        return self.incumbent_bytes < SMALLER[self.kind] * self.candidate_bytes

    @property
    def much_smaller(self) -> bool:
        """Returns whether the candidate saves enough memory to be kept without being faster."""
        return self.candidate_bytes < _MUCH_SMALLER[self.kind] * self.incumbent_bytes

    def __str__(self) -> str:
        return f"{format_bytes(self.incumbent_bytes)} → {format_bytes(self.candidate_bytes)}, speed {self.ratio}"


class Objective(StrEnum):
    """What a climb minimizes or maximizes."""

    LATENCY = "latency"
    P99 = "p99"
    THROUGHPUT = "throughput"
    REQUESTS = "requests"
    MEMORY = "memory"

    @classmethod
    def named(cls, text: str) -> "Objective":
        try:
            return cls(text)
        except ValueError:
            raise RedlineError(f"unknown objective {text!r}: choose {', '.join(cls)}.") from None

    def judge(self, comparison: Comparison, margin: float = WORTHWHILE) -> tuple[bool, str]:
        """Returns whether the candidate is better beyond the noise, and why; gains below `margin` do not count."""
        if not (comparison.fits and comparison.incumbent_fits):
            return _judge_by_limit(comparison)
        faster = comparison.ratio.above(margin)
        if self is Objective.MEMORY:
            if comparison.smaller:
                return True, f"smaller: {comparison}"
            if comparison.larger:
                return False, f"larger: {comparison}"
            return faster, f"equal memory, and {'faster' if faster else 'not faster'}: {comparison}"
        if faster:
            return True, f"{comparison.ratio} faster"
        if comparison.ratio.above(NOT_SLOWER) and comparison.much_smaller:
            return True, f"equally fast, and smaller: {comparison}"
        return False, f"{'slower' if comparison.ratio.below(1.0) else 'no gain beyond the noise'}: {comparison.ratio}"

    def gain(self, comparison: Comparison) -> str:
        """Returns the gain as text, in the figures that matter for this objective."""
        return str(comparison) if self is Objective.MEMORY else str(comparison.ratio)

    def change(self, comparison: Comparison) -> str:
        """Compares a later run with an earlier one: returns "slower", "larger", "faster", "smaller" or "same"."""
        seen = set()
        if comparison.ratio.below(1.0) and comparison.ratio.middle < 1 - _DRIFT:
            seen.add("slower")
        if comparison.ratio.above(1.0) and comparison.ratio.middle > 1 + _DRIFT:
            seen.add("faster")
        drift = 1 + _DRIFT_BYTES[comparison.kind]
        if comparison.candidate_bytes > drift * comparison.incumbent_bytes > 0:
            seen.add("larger")
        if 0 < drift * comparison.candidate_bytes < comparison.incumbent_bytes:
            seen.add("smaller")
        # A larger peak is a regression for every objective; speed objectives report a slower step first.
        speed_first, memory_first = ("slower", "larger", "faster", "smaller"), ("larger", "smaller", "slower", "faster")
        order = memory_first if self is Objective.MEMORY else speed_first
        return next((word for word in order if word in seen), "same")


def kind_of_device(device: str) -> str:
    return "cuda" if device.startswith("cuda") else "cpu"


def is_within(peak_bytes: int, limit_bytes: int) -> bool:
    return not limit_bytes or peak_bytes <= limit_bytes


def above_limit(peak_bytes: int, limit_bytes: int) -> str:
    """Returns the reason for which a plan with this peak cannot be the answer."""
    return f"above --max-memory {format_bytes(limit_bytes)}: its peak is {format_bytes(peak_bytes)}"


def _judge_by_limit(comparison: Comparison) -> tuple[bool, str]:
    """Judges a comparison in which at least one plan is above the memory limit."""
    if comparison.fits:
        return True, f"within --max-memory {format_bytes(comparison.limit_bytes)}: {comparison}"
    if not comparison.incumbent_fits and comparison.smaller:
        return True, f"closer to --max-memory {format_bytes(comparison.limit_bytes)}: {comparison}"
    return False, above_limit(comparison.candidate_bytes, comparison.limit_bytes)
