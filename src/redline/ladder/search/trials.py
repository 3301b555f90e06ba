"""Trials: sets up a candidate plan, times it in turns with the incumbent (best plan so far), records the verdict."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import Arm, close, compare_arms, geometric_mean_s, measure_peak, take_turns
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import WORTHWHILE, Objective, above_limit, is_within
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung
from redline.ladder.search.budget import Budget
from redline.ladder.search.estimates import Estimates
from redline.ladder.search.history import History
from redline.ladder.search.incumbent import Incumbent
from redline.ladder.search.parallel_setups import ParallelSetups, may_run_in_parallel
from redline.ladder.search.preparation import ask_machine, prepare_trials
from redline.ladder.search.progress import Progress
from redline.ladder.search.run_log import RunLog
from redline.ladder.search.settings import Settings
from redline.ladder.statistics import Interval
from redline.machine.load import LoadMeter, current_load

# No trial is started with less time left than this.
_OVERHEAD_S = 2.0
# A trial is timed for at least this long, even if this uses time that is reserved for the final race.
_LEAST_SAMPLING_S = 0.5
# A plan counts as probably faster if the measured ratio exceeds this value, but the lower end of the ratio's confidence
# interval does not.
_PROBABLY = 1.1


class Trials:
    """Measures plans against the incumbent. Every failure is recorded as a row with its reason.

    In the methods, `added` holds the rungs that are added to the incumbent: one, or a few that only work together.
    """

    def __init__(self, settings: Settings, pool: WorkerPool, budget: Budget, progress: Progress) -> None:
        self._settings, self._budget, self._progress = settings, budget, progress
        self.load = current_load()
        contended = self.load.is_contended(settings.device.startswith("cuda"))
        if contended:
            self.announce(f"{self.load}: confidence intervals will be wide, and every trial takes longer")
        self.announce("running the untouched model for reference")
        # The ceilings are measured later, because that takes seconds, and a wrong workload address should fail at once.
        found = ask_machine(pool, settings.device, measure=False)
        threads = max(1, int(found.cores - self.load.other_cores)) if contended else 0
        self.spec, facts = prepare_trials(pool, settings, found, threads)
        if facts.state:
            self.announce(facts.state)
        self.announce("reading the machine's properties")
        # On a busy machine measured ceilings would be wrong; without them, the hardware's features decide what to try.
        self.machine = ask_machine(pool, settings.device, measure=not contended)
        self.training = facts.training
        self.log = RunLog(self.spec, self.machine, facts, settings.measurements_path)
        self.estimates = Estimates(History.of(self.machine), facts.digest, facts.operations, facts.training)
        self.estimates.slowdown = self.load.slowdown(threads=2)
        self.setups = ParallelSetups(pool, self.spec, self.machine)
        self.incumbent = Incumbent(self.setups, self.spec, self.machine.device_bytes, self.announce)

    @property
    def plan(self) -> Plan:
        return self.incumbent.plan

    def candidate(self, added: Plan) -> Plan:
        """Returns the incumbent plan with these rungs added."""
        plan = self.plan
        for rung in added.rungs:
            plan = plan.with_rung(rung)
        return plan

    def announce(self, text: str) -> None:
        self._progress(text, None)

    def report(self, row: Measurement) -> Measurement:
        self._progress(f"{row.rung or row.plan}: {row.verdict}", row)
        return row

    def record(self, role: str, plan: Plan, verdict: str, reason: str, *seen: Any, **values: Any) -> Measurement:
        return self.report(self.log.record(self.log.row(role, plan, verdict, reason, *seen, **values)))

    def take_turns(self, arms: list[Arm], about: dict[str, Any]) -> list[dict[str, list[float]]]:
        """Times the arms in turns, and stores the load of other processes in `about`, which holds fields of a row."""
        sampling_s = min(self.spec.sampling_s, max(_LEAST_SAMPLING_S, self._budget.left_s))
        with self.setups.search.paused():
            meter = LoadMeter([arm.worker.pid for arm in arms])
            taken = take_turns(arms, self.spec, sampling_s)
        about["load"] = asdict(meter.read())
        return taken

    def close(self) -> None:
        self.setups.discard()
        self.setups.search.stop()
        self.incumbent.close()

    def expected_s(self, candidate: Plan) -> float:
        """Returns the time that a trial of this plan is expected to take."""
        # On average a comparison is decided after about half of the sampling time.
        return self.estimates.trial_s(candidate) + max(self.spec.sampling_s / 2, self.least_timing_s)

    @property
    def least_timing_s(self) -> float:
        """The minimum time of the timing of one comparison, for the objectives p99 and requests; 0 for the others.

        These two need a minimum number of calls; each call is assumed to take as long as one of the untouched model.
        """
        needs_many = self.spec.is_tail or self.spec.callers
        if not needs_many or not self.log.rows:
            return 0.0
        return 2 * self.spec.least_steps * geometric_mean_s(self.log.rows[0].samples)

    def why_too_long(self, candidate: Plan, start_share: float = 1.0) -> str:
        """Returns why the trial is not started if it cannot end within the budget, else "".

        `start_share` is the share of the expected time that must be left to start the trial.
        """
        expected_s, left_s = self.expected_s(candidate), max(0.0, self._budget.left_s)
        if start_share * expected_s <= left_s:
            return ""
        if left_s < _OVERHEAD_S:
            return "the budget was spent"
        return f"it takes about {expected_s:.0f} s, and {left_s:.0f} s of the budget are left"

    def is_target_reached(self) -> bool:
        target = self._settings.target
        kept = (row for row in self.log.rows if row.verdict == "kept" or row.role == "baseline")
        return target is not None and any(map(target.reached, kept))

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Sets up the first few of these plans in parallel."""
        self.setups.discard()
        room = self.setups.at_once(max(row.peak_bytes for row in self.log.rows), self.incumbent.alive_count)
        parallel = may_run_in_parallel(plans)
        next_ones = [plan for plan in plans if plan in parallel][:room]
        if len(next_ones) < 2 or plans[0] not in parallel or self._budget.is_spent or self.is_target_reached():
            return
        self.announce(f"setting up {len(next_ones)} plans in parallel")
        try:
            self.incumbent.arm()  # set up first, so that a candidate, not the incumbent, fails if memory is short
        except WorkerFailed:
            return
        self.setups.prepare({plan: self.limit_s(plan) for plan in next_ones})

    def limit_s(self, candidate: Plan) -> float:
        """Returns the time limit; the first compilation may use all the time left, because it often gains the most."""
        first = "compile" in candidate and not self.estimates.has_seen(candidate)
        return self._budget.limit_s(self.estimates.trial_s(candidate), to_the_end=first)

    def measure(self, role: str, added: Plan, candidate: Plan, retry: bool = True) -> Measurement:
        """Measures the candidate against the incumbent, or recalls the measurement of a resumed climb."""
        known = self.log.recall(role, str(added), str(self.plan))
        if known is not None:
            return self.report(known)
        self.announce(f"trying {added}")
        about: dict[str, Any] = {"rung": str(added), "against": str(self.plan)}
        arm: Arm | None = None
        limit_s = self.limit_s(candidate)
        start_s, prepared = time.monotonic(), self.setups.has(candidate)
        try:
            incumbent, arm = self._open_beside(candidate, limit_s)
            setup_s = sum(arm.setup_s.values())
            if arm.failed_score is not None:
                self.estimates.record(str(added), candidate, setup_s, 1.0, arm.cached)
                return self.record(role, arm.plan, "refused", f"outside the gate: {arm.failed_score}", arm, **about)
            measure_peak(arm, self.spec)
            if not prepared:
                self.estimates.observe_open(time.monotonic() - start_s - setup_s)
            if reason := self._why_not_the_answer(role, incumbent, arm):
                return self.record(role, arm.plan, "dropped", reason, arm, **about)
            notes: tuple[str, ...] = ()
            if incumbent is not None:
                old, new = self.take_turns([incumbent, arm], about)
            else:
                (new,) = self.take_turns([arm], about)
                close(arm)
                incumbent = self.incumbent.arm()
                (old,) = self.take_turns([incumbent], about)
                notes = ("timed one after the other, because the two plans do not fit in memory together",)
            comparison = compare_arms(self.spec, incumbent, arm, old, new)
            if role == "opening" and not notes and _is_undecided(comparison.ratio):
                # An opening takes long to set up, and noise alone should not decide against it.
                more_old, more_new = self.take_turns([incumbent, arm], about)
                old = {label: values + more_old[label] for label, values in old.items()}
                new = {label: values + more_new[label] for label, values in new.items()}
                comparison = compare_arms(self.spec, incumbent, arm, old, new)
            better, reason = self.spec.objective.judge(comparison)
            if not better and comparison.fits and (why := self._why_probable(role, added, comparison.ratio)):
                better, reason = True, f"{reason}; {why}"
            verdict = "kept" if better else "dropped"
            self.estimates.record(
                str(added), candidate, setup_s, comparison.ratio.middle if better else 1.0, arm.cached
            )
            if role == "compile":
                verdict, reason = "baseline", f"torch.compile on the untouched model; {reason}"
            row = self.record(role, arm.plan, verdict, reason, arm, new, old, notes, **about)
            if verdict in ("kept", "baseline") and not notes:
                self.incumbent.keep_alive(arm)
                arm = None
            return row
        except WorkerFailed as failure:
            close(arm)
            if self.incumbent.lost_process(failure) and retry:
                return self.measure(role, added, candidate, retry=False)
            # A timeout during the set-up may be due to the budget. After the set-up it means that the plan hangs.
            out_of_budget = arm is None and failure.kind == "timeout" and limit_s < self._settings.timeout_s
            if arm is None:
                self.estimates.record_failure(str(added), candidate, failure, limit_s)
            return self.record(role, candidate, *_describe_failure(failure, out_of_budget), **about)
        finally:
            close(arm)

    def _why_not_the_answer(self, role: str, incumbent: Arm | None, arm: Arm) -> str:
        """Returns why a plan need not be timed: it is above the memory limit, and the incumbent is within it."""
        limit_bytes = self.spec.max_bytes
        if role == "compile" or incumbent is None or not is_within(incumbent.peak_bytes, limit_bytes):
            return ""
        return "" if is_within(arm.peak_bytes, limit_bytes) else above_limit(arm.peak_bytes, limit_bytes)

    def _why_probable(self, role: str, added: Plan, ratio: Interval) -> str:
        """Returns why a plan is kept under the present load, although the noise hides whether it is faster; else "".

        A change of the number of threads is kept, because with one thread per core, times on a busy machine vary so
        much that no later trial could be decided. An opening is kept, and the final race times it again.
        """
        contended = self.load.is_contended(self.machine.is_cuda)
        if not contended or not _is_undecided(ratio) or self.spec.objective is Objective.MEMORY:
            return ""
        if [rung.name for rung in added.rungs] == ["threads"]:
            return "kept because plans with more threads wait for other processes"
        # The center of the confidence interval (its geometric mean) must be above 1.
        likely = role in ("opening", "ablation") and ratio.high * ratio.low > 1
        return "kept because it is probably faster, which the load on this machine hides" if likely else ""

    def ablate(self, rung: Rung, smaller: Plan, retry: bool = True) -> Measurement:
        """Measures the incumbent without a rung; the verdict is "dropped" if the plan is as good without it."""
        known = self.log.recall("ablation", str(rung), str(self.plan))
        if known is not None:
            return self.report(known)
        self.announce(f"removing {rung}")
        about: dict[str, Any] = {"rung": str(rung), "against": str(self.plan)}
        arm: Arm | None = None
        try:
            whole = self.incumbent.arm()
            arm = self.setups.open(smaller, timeout_s=self.limit_s(smaller))
            if not arm.passed:
                return self.record("ablation", smaller, "kept", "the gate fails without this rung", arm, **about)
            measure_peak(arm, self.spec)
            old, new = self.take_turns([whole, arm], about)
            # The plan with the rung is the candidate: it has to be better than the plan without the rung.
            comparison = compare_arms(self.spec, arm, whole, new, old)
            worth, gain = self.spec.objective.judge(comparison)
            if (
                not worth
                and comparison.fits
                and (why := self._why_probable("ablation", Plan((rung,)), comparison.ratio))
            ):
                worth, gain = True, f"{gain}; {why}"
            reason = f"{'improves the whole plan' if worth else 'redundant beside the other rungs'}: {gain}"
            row = self.record("ablation", arm.plan, "kept" if worth else "dropped", reason, arm, new, old, **about)
            if not worth:
                self.incumbent.keep_alive(arm)
                arm = None
            return row
        except WorkerFailed as failure:
            close(arm)
            if self.incumbent.lost_process(failure) and retry:
                return self.ablate(rung, smaller, retry=False)
            verdict = "unmeasured" if failure.kind in ("oom", "timeout", "lost") else "kept"
            problem = "not measured" if verdict == "unmeasured" else "the other rungs do not run without this rung"
            return self.record("ablation", smaller, verdict, f"{problem}: {failure}", **about)
        finally:
            close(arm)

    def _open_beside(self, candidate: Plan, timeout_s: float) -> tuple[Arm | None, Arm]:
        """Returns the processes of both plans; None for the incumbent if the GPU has too little memory for both."""
        incumbent = self.incumbent.arm()
        try:
            return incumbent, self.setups.open(candidate, timeout_s=timeout_s)
        except WorkerFailed as failure:
            if failure.kind != "oom" or not self.machine.is_cuda:
                raise
        self.incumbent.close_others()
        try:
            return incumbent, self.setups.open(candidate, timeout_s=timeout_s)
        except WorkerFailed as failure:
            if failure.kind != "oom":
                raise
        self.incumbent.close()
        return None, self.setups.open(candidate, timeout_s=timeout_s)


def _is_undecided(ratio: Interval) -> bool:
    """Returns whether a plan is probably faster, but not beyond the noise."""
    return ratio.low < _PROBABLY < ratio.middle and not ratio.above(WORTHWHILE)


def _describe_failure(failure: WorkerFailed, out_of_budget: bool) -> tuple[str, str]:
    """Returns the verdict and the reason that are recorded for a failure."""
    if out_of_budget:
        return "unmeasured", f"{failure} to stay within the budget"
    verdict = failure.kind if failure.kind in ("unavailable", "refused") else "failed"
    return verdict, f"out of memory: {failure}" if failure.kind == "oom" else str(failure)
