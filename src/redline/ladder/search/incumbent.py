"""The incumbent: the best plan so far, the plans before it, and the process in which it runs."""

from collections.abc import Callable

from redline.errors import WorkloadError
from redline.ladder.measuring.trial import Arm, TrialSpec, close, measure_peak
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.parallel_setups import ParallelSetups


class Incumbent:
    """Starts with the untouched model. `announce` is called with a sentence when a plan is lost."""

    def __init__(self, setups: ParallelSetups, spec: TrialSpec, announce: Callable[[str], None]) -> None:
        self.plan = Plan()
        self._setups, self._spec, self._announce = setups, spec, announce
        self._earlier: list[Plan] = []
        self._arm: Arm | None = None

    def replace_plan(self, plan: Plan) -> None:
        self._earlier.append(self.plan)
        self.plan = plan

    def arm(self) -> Arm:
        """Returns the running plan, and sets it up first if necessary.

        If the plan does not run again, the plan before it becomes the incumbent, and `WorkerFailed` is raised, because
        the caller compares with the plan that was lost.
        """
        if self._arm is not None and self._arm.plan == self.plan:
            return self._arm
        self.close()
        arm: Arm | None = None
        try:
            arm = self._setups.open(self.plan)
            measure_peak(arm, self._spec)
        except WorkerFailed as failure:
            close(arm)
            if not self._earlier:
                raise WorkloadError(f"{self._spec.label} under {self.plan}: {failure}.") from failure
            lost, self.plan = self.plan, self._earlier.pop()
            text = f"the kept plan {lost} does not run again ({failure}), so {self.plan} takes its place"
            self._announce(text)
            raise WorkerFailed("lost", text) from failure
        self._arm = arm
        return arm

    def take_over(self, arm: Arm) -> None:
        """Adopts the running process of a candidate that was kept."""
        self.close()
        self._arm = arm

    def lost_process(self, failure: WorkerFailed) -> bool:
        """Returns whether the incumbent's process failed; if so, closes it, and `arm()` will start a new one."""
        if self._arm is None or failure.pid != self._arm.worker.pid:
            return False
        self.close()
        return True

    def close(self) -> None:
        close(self._arm)
        self._arm = None
