"""The incumbent: the best plan so far, the earlier incumbents, and the processes in which these plans run.

The processes of earlier incumbents stay alive while memory allows, because the final race times them again.
"""

from collections.abc import Callable

from redline.errors import WorkloadError
from redline.ladder.measuring.trial import Arm, TrialSpec, close, measure_peak
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.parallel_setups import ParallelSetups

# At most this many processes stay alive, and together they use at most this share of the device's memory.
_MOST_ALIVE = 4
_SHARE_OF_MEMORY = 0.4


class Incumbent:
    """Holds the best plan, at first the untouched model. Calls `announce` with a sentence if that plan is lost."""

    def __init__(
        self, setups: ParallelSetups, spec: TrialSpec, memory_bytes: int, announce: Callable[[str], None]
    ) -> None:
        self.plan = Plan()
        self._setups, self._spec, self._announce = setups, spec, announce
        self._memory_bytes = memory_bytes
        self._earlier: list[Plan] = []
        self._alive: dict[Plan, Arm] = {}

    def replace_plan(self, plan: Plan) -> None:
        self._earlier.append(self.plan)
        self.plan = plan

    def arm(self) -> Arm:
        """Returns the process in which the incumbent runs; sets it up first if necessary.

        If the plan cannot be set up again, makes the previous plan the incumbent and raises `WorkerFailed`, because the
        caller's comparison with the lost plan is not possible.
        """
        if self.plan in self._alive:
            return self._alive[self.plan]
        try:
            arm = self._setups.open(self.plan)
            measure_peak(arm, self._spec)
        except WorkerFailed as failure:
            if not self._earlier:
                raise WorkloadError(f"{self._spec.label} under {self.plan}: {failure}.") from failure
            lost, self.plan = self.plan, self._earlier.pop()
            text = f"the kept plan {lost} cannot be set up again ({failure}), so {self.plan} replaces it"
            self._announce(text)
            raise WorkerFailed("lost", text) from failure
        self.keep_alive(arm)
        return arm

    def keep_alive(self, arm: Arm) -> None:
        """Adds a running process, and ends the oldest processes if there are too many or they use too much memory."""
        close(self._alive.pop(arm.plan, None))
        self._alive[arm.plan] = arm
        # Ends the oldest process first and the untouched model's last; never ends the incumbent's or the new one.
        others = [plan for plan in self._alive if plan not in (arm.plan, self.plan)]
        for plan in sorted(others, key=lambda plan: plan == Plan()):
            held = sum(alive.peak_bytes for alive in self._alive.values())
            if len(self._alive) <= _MOST_ALIVE and held <= _SHARE_OF_MEMORY * self._memory_bytes:
                return
            close(self._alive.pop(plan))

    def lost_process(self, failure: WorkerFailed) -> bool:
        """Returns whether the incumbent's process failed; if so, closes it. `arm()` will then start a new process."""
        arm = self._alive.get(self.plan)
        if arm is None or failure.pid != arm.worker.pid:
            return False
        close(self._alive.pop(self.plan))
        return True

    def is_alive(self, plan: Plan) -> bool:
        return plan in self._alive

    @property
    def alive_count(self) -> int:
        return len(self._alive)

    def close_others(self) -> None:
        """Ends the processes of all plans except the incumbent, to free their memory."""
        for plan in [plan for plan in self._alive if plan != self.plan]:
            close(self._alive.pop(plan))

    def release(self) -> dict[Plan, Arm]:
        """Hands the running processes over to the caller, who must close them."""
        released, self._alive = self._alive, {}
        return released

    def close(self) -> None:
        close(*self.release().values())
