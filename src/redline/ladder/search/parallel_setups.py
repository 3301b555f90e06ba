"""Sets up several plans in parallel, because a compiler keeps one core busy while the GPU idles.

No plan is timed during this: `prepare` returns when every plan is set up or has failed. A plan with a rung that times
kernels to find the fastest is set up alone. Plans that are no longer needed, because the incumbent has changed, are
discarded.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from redline.ladder.measuring.trial import JUDGE_SEEDS, Arm, TrialSpec, close, closed_on_failure, open_arm
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.plan import Plan
from redline.ladder.search.background_search import BackgroundSearch
from redline.machine.host_memory import available_host_bytes
from redline.machine.machine import Machine

_MOST = 4
# The minimum number of cores per set-up: a compiler uses several threads, so that with fewer cores parallel set-ups
# would only slow each other down.
_CORES_EACH = 4
# The host memory to expect for each process: torch, CUDA, a compiler and a copy of a large model.
_HOST_BYTES_EACH = 12 * 2**30
_SHARE_OF_MEMORY = 0.8


class ParallelSetups:
    """Sets up the plans of a climb, several in parallel if the machine has enough cores and memory."""

    def __init__(self, pool: WorkerPool, spec: TrialSpec, machine: Machine) -> None:
        self._pool, self._spec, self._machine = pool, spec, machine
        self._ready: dict[Plan, Arm | WorkerFailed] = {}
        self.search = BackgroundSearch(pool, spec)

    def at_once(self, peak_bytes: int, alive: int = 1) -> int:
        """Returns how many plans to set up in parallel while `alive` others run; each needs `peak_bytes` on the GPU."""
        if not self._machine.is_cuda:
            return 1  # on a CPU, parallel set-ups would compete for the same cores
        machine, peak_bytes = self._machine, max(peak_bytes, 1)
        alive += self.search.is_running
        on_device = int(_SHARE_OF_MEMORY * machine.device_bytes // peak_bytes) - alive
        # The available memory already excludes what the running processes use.
        on_host = int(_SHARE_OF_MEMORY * available_host_bytes() // _HOST_BYTES_EACH)
        return max(1, min(_MOST, machine.cores // _CORES_EACH, on_device, on_host))

    def has(self, plan: Plan) -> bool:
        return plan in self._ready

    def prepare(self, timeouts_s: Mapping[Plan, float], seeds: tuple[int, ...] = JUDGE_SEEDS) -> None:
        """Sets up these plans in parallel, and waits until each is ready or has failed."""
        self.discard()
        others = len(timeouts_s) - 1
        note = (f"set up in parallel with {others} other plan{'s' if others > 1 else ''}, so each took longer",)

        def set_up(plan: Plan) -> Arm | WorkerFailed:
            try:
                arm = open_arm(self._pool, self._spec, plan, seeds, timeouts_s[plan])
            except WorkerFailed as failure:
                return failure
            arm.notes += note if others else ()
            return arm

        # A `with` block would wait for the threads after an interrupt. The threads end when their workers end.
        threads = ThreadPoolExecutor(max(1, len(timeouts_s)))
        try:
            self._ready = dict(zip(timeouts_s, threads.map(set_up, timeouts_s), strict=True))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def open(self, plan: Plan, seeds: tuple[int, ...] = JUDGE_SEEDS, timeout_s: float = 0) -> Arm:
        """Returns the plan's process if it is ready, and otherwise sets the plan up now. Raises `WorkerFailed`."""
        if plan == self.search.plan:
            return self._with_step_time(self.search.take())
        found = self._ready.pop(plan, None)
        if isinstance(found, Arm):
            return self._with_step_time(found)
        if isinstance(found, WorkerFailed) and found.kind not in ("oom", "crash", "error"):
            raise found
        if found is not None:
            self.discard()  # the plan may have failed for lack of memory, so it is set up again alone
        # The background search must not run kernels while the set-up of this plan times kernels.
        with nullcontext() if may_run_in_parallel([plan]) else self.search.paused():
            try:
                return open_arm(self._pool, self._spec, plan, seeds, timeout_s)
            except WorkerFailed as failure:
                if failure.kind != "oom" or not (self._ready or self.search.is_running):
                    raise
            self.discard()
            self.search.stop()
            return open_arm(self._pool, self._spec, plan, seeds, timeout_s)

    def discard(self) -> None:
        """Ends the processes of the prepared plans."""
        close(*(arm for arm in self._ready.values() if isinstance(arm, Arm)))
        self._ready.clear()

    def _with_step_time(self, arm: Arm) -> Arm:
        """Measures the rough step time again, because other plans were compiling during the first measurement."""
        once = dict.fromkeys(self._spec.shapes, 1)
        with closed_on_failure(arm):
            arm.step_s = arm.worker.ask("sample", self._spec.timeout_s, steps=once, warm=once)
        return arm


def may_run_in_parallel(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans whose set-up does not time kernels."""
    return [plan for plan in plans if not any(rung.autotunes for rung in plan.rungs)]
