"""Set-ups side by side: a compiler keeps a core busy and the GPU idle, so plans that come next are set up at once.

No sample is taken meanwhile: `prepare` comes back when all of them stand. A plan with a rung that searches for the
fastest kernel by timing is set up alone. What was set up in vain, because the plan below it has changed, is thrown
away.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from redline.ladder.measuring.trial import JUDGE_SEEDS, Arm, TrialSpec, close, open_arm
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.plan import Plan
from redline.machine.machine import Machine

_MOST = 4
# A compiler has threads of its own: with fewer cores than this for each, set-ups only take turns.
_CORES_EACH = 4
# Main memory of a process with torch, CUDA and a compiler, and its copy of a large model.
_HOST_BYTES_EACH = 12 * 2**30
_SHARE_OF_MEMORY = 0.8
# Cores are shared, so that a set-up takes longer than alone.
_PATIENCE = 1.5


class ParallelSetups:
    """Opens the arms of a climb, ahead of their turn where the machine has room for it."""

    def __init__(self, pool: WorkerPool, spec: TrialSpec, machine: Machine) -> None:
        self._pool, self._spec, self._machine = pool, spec, machine
        self._standing: dict[str, Arm | WorkerFailed] = {}

    def at_once(self, peak_bytes: int) -> int:
        """How many may stand beside the plan that is kept, when each needs about so much of the device's memory."""
        if not self._machine.is_cuda:
            return 1  # their arithmetic would need the very cores
        machine, peak_bytes = self._machine, max(peak_bytes, 1)
        on_device = int(_SHARE_OF_MEMORY * machine.device_bytes // peak_bytes) - 1
        on_host = int(_SHARE_OF_MEMORY * machine.host_bytes // _HOST_BYTES_EACH) - 1
        return max(1, min(_MOST, machine.cores // _CORES_EACH, on_device, on_host))

    def stands(self, plan: Plan) -> bool:
        return str(plan) in self._standing

    def prepare(self, timeouts_s: Mapping[str, float], seeds: tuple[int, ...] = JUDGE_SEEDS) -> None:
        """Sets up these plans at the same time, and waits until each stands or has failed."""
        self.discard()
        others = len(timeouts_s) - 1
        note = (f"set up beside {others} other plan{'s' if others > 1 else ''}, which takes longer than alone",)

        def set_up(plan: str) -> Arm | WorkerFailed:
            try:
                arm = open_arm(self._pool, self._spec, Plan.parse(plan), seeds, _PATIENCE * timeouts_s[plan])
            except WorkerFailed as failure:
                return failure
            arm.notes += note if others else ()
            return arm

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
            return self._with_quiet_step(found)
        if isinstance(found, WorkerFailed) and found.kind not in ("oom", "crash", "error"):
            raise found
        if found is not None:
            self.discard()  # what failed beside others, for want of memory perhaps, gets the machine to itself
        try:
            return open_arm(self._pool, self._spec, plan, seeds, timeout_s)
        except WorkerFailed as failure:
            if failure.kind != "oom" or not self._standing:
                raise
        self.discard()
        return open_arm(self._pool, self._spec, plan, seeds, timeout_s)

    def discard(self) -> None:
        close(*(arm for arm in self._standing.values() if isinstance(arm, Arm)))
        self._standing.clear()

    def _with_quiet_step(self, arm: Arm) -> Arm:
        """Its rough time per step, which says how many make a sample, was taken while others compiled."""
        once = dict.fromkeys(self._spec.shapes, 1)
        try:
            arm.step_s = arm.worker.ask("sample", self._spec.timeout_s, steps=once, warm=once)
        except WorkerFailed:
            close(arm)
            raise
        return arm


def may_stand_beside_others(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if not any(rung.searches for rung in plan.rungs)]
