"""Set-ups side by side: a compiler keeps a core busy and the GPU idle, so plans that come next are set up at once.

Nothing is timed meanwhile: `prepare` comes back when all of them stand. What was set up in vain, because the plan
below it has changed, is thrown away.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from redline.machine import Machine
from redline.plan import Plan
from redline.trial import JUDGE_SEEDS, Arm, Course, close, open_arm
from redline.workers import WorkerFailed, WorkerPool

_MOST = 4
# A compiler has threads of its own: with fewer cores than this for each, set-ups only take turns.
_CORES_EACH = 4
_SHARE_OF_MEMORY = 0.8


class SetUps:
    """Opens the arms of a climb, ahead of their turn where the machine has room for it."""

    def __init__(self, pool: WorkerPool, course: Course, machine: Machine) -> None:
        self._pool, self._course, self._machine = pool, course, machine
        self._standing: dict[str, Arm | WorkerFailed] = {}

    def at_once(self, peak_bytes: int) -> int:
        """How many may stand beside the plan that is kept, when each needs about so much memory."""
        if not self._machine.is_cuda:
            return 1  # their arithmetic would need the very cores
        fit = int(_SHARE_OF_MEMORY * self._machine.device_bytes // max(peak_bytes, 1)) - 1
        return max(1, min(_MOST, self._machine.cores // _CORES_EACH, fit))

    def stands(self, plan: Plan) -> bool:
        return str(plan) in self._standing

    def prepare(self, timeouts_s: Mapping[str, float], seeds: tuple[int, ...] = JUDGE_SEEDS) -> None:
        """Sets up these plans at the same time, and waits until each stands or has failed."""
        self.discard()

        def set_up(plan: str) -> Arm | WorkerFailed:
            try:
                return open_arm(self._pool, self._course, Plan.parse(plan), seeds, timeouts_s[plan])
            except WorkerFailed as failure:
                return failure

        # Not as a context manager, which waits: whoever interrupts this ends the workers, and so the threads.
        threads = ThreadPoolExecutor(max(1, len(timeouts_s)))
        try:
            self._standing = dict(zip(timeouts_s, threads.map(set_up, timeouts_s), strict=True))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def open(self, plan: Plan, seeds: tuple[int, ...] = JUDGE_SEEDS, timeout_s: float = 0) -> Arm:
        """The plan's arm, from those that stand or set up now. Raises `WorkerFailed`."""
        found = self._standing.pop(str(plan), None)
        if isinstance(found, Arm):
            return found
        if isinstance(found, WorkerFailed) and found.kind != "oom":
            raise found
        if found is not None:
            self.discard()  # with the memory to itself it may fit
        return open_arm(self._pool, self._course, plan, seeds, timeout_s)

    def discard(self) -> None:
        close(*(arm for arm in self._standing.values() if isinstance(arm, Arm)))
        self._standing.clear()
