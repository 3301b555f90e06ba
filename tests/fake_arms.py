"""Plans that run in no process: each takes as long as it is told, and may fail when it is asked."""

from collections.abc import Callable, Mapping
from typing import Any

from redline.ladder.gate import Score
from redline.ladder.measuring.trial import Arm
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan

GREEN = Score("max_error", 0.0, 1.0, "lower", True)
RED = Score("max_error", 2.0, 1.0, "lower", False)


class FakeWorker:
    """`seconds` gives a step's time by shape; a worker that `dies` fails at its next sample."""

    def __init__(self, pid: int, seconds: Callable[[], Mapping[str, float]], peak_bytes: int = 1000) -> None:
        self.pid, self._seconds, self._peak_bytes = pid, seconds, peak_bytes
        self.dies, self.stopped = False, False
        self.asked: list[dict[str, Any]] = []
        # The scores when it is judged again.
        self.scores: tuple[Score, ...] = (GREEN,)

    def ask(self, request: str, timeout_s: float, **about: Any) -> Any:
        if self.dies:
            raise WorkerFailed("crash", "it was killed", self.pid)
        if request == "peak":
            return self._peak_bytes
        if request == "judge_again":
            return self.scores
        self.asked.append(about)
        return self._seconds()

    def stop(self) -> None:
        self.stopped = True


def fake_arm(
    plan: str, step_s: float = 0.01, *, pid: int = 1, score: Score = GREEN, peak_bytes: int = 1000, shape: str = ""
) -> Any:
    """With a little noise, the same in every run."""
    turns = iter(range(10**6))
    worker: Any = FakeWorker(pid, lambda: {shape: step_s * (1 + 0.001 * (next(turns) % 5))}, peak_bytes)
    return Arm(Plan.parse(plan), worker, {}, False, 0, (score,), {}, (), "fp32", 0, {}, {shape: step_s}, "cpu")
