"""The plan that a climb keeps, with those before it, and the process in which it runs."""

from collections.abc import Callable

from redline.errors import WorkloadError
from redline.ladder.measuring.trial import Arm, TrialSpec, close, measure_peak
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.parallel_setups import ParallelSetups


class Incumbent:
    """Begins with the untouched model. `tell` is given a sentence when a plan is lost."""

    def __init__(self, setups: ParallelSetups, spec: TrialSpec, tell: Callable[[str], None]) -> None:
        self.plan = Plan()
        self._setups, self._spec, self._tell = setups, spec, tell
        self._earlier: list[Plan] = []
        self._arm: Arm | None = None

    def keep(self, plan: str) -> None:
        self._earlier.append(self.plan)
        self.plan = Plan.parse(plan)

    def arm(self) -> Arm:
        """Opened when first needed.

        A plan that does not run again is left for the one before it, and what was to be timed against it has failed.
        """
        if self._arm is not None and str(self._arm.plan) == str(self.plan):
            return self._arm
        self.close()
        arm: Arm | None = None
        try:
            arm = self._setups.open(self.plan)
            measure_peak(arm, self._spec)
        except WorkerFailed as failure:
            close(arm)
            if not self._earlier:
                raise WorkloadError(f"{self._spec.address} under {self.plan}: {failure}.") from failure
            lost, self.plan = self.plan, self._earlier.pop()
            text = f"the kept plan {lost} does not run again ({failure}), so {self.plan} takes its place"
            self._tell(text)
            raise WorkerFailed("lost", text) from failure
        self._arm = arm
        return arm

    def take_over(self, arm: Arm) -> None:
        """A candidate that is to be kept runs already."""
        self.close()
        self._arm = arm

    def lost_process(self, failure: WorkerFailed) -> bool:
        """Whether it was the kept plan's process that failed; it is opened anew when it is needed next."""
        if self._arm is None or failure.pid != self._arm.worker.pid:
            return False
        self.close()
        return True

    def close(self) -> None:
        close(self._arm)
        self._arm = None
