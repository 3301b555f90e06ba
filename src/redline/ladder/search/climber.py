"""The order of a climb: baselines, one rung at a time, second looks, ablation, final race.

Every measurement is written to disk as it is made, so that a climb that was killed can be resumed.
"""

from collections.abc import Iterator
from dataclasses import replace

from redline.errors import WorkloadError
from redline.files.atomic import check_can_write
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import geometric_mean_s, take_turns
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.budget import Budget, searches_kernels
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.final_race import run_race
from redline.ladder.search.progress import Progress
from redline.ladder.search.search_order import candidates, check_asked, may_try
from redline.ladder.search.settings import Settings
from redline.ladder.search.trials import Trials

_COMPILE_MODES = {"cuda": ("default", "reduce-overhead", "max-autotune"), "cpu": ("default",)}


class Climber:
    """Runs one climb; `run()` returns its result."""

    def __init__(self, settings: Settings, pool: WorkerPool, progress: Progress) -> None:
        self.settings = settings
        self.budget = Budget(settings.budget_s, settings.timeout_s)
        if settings.folder is not None:
            check_can_write(settings.folder)
        self.trials = Trials(settings, pool, self.budget, progress)
        check_asked(settings, self.trials.training)
        self.log = self.trials.log
        self.resumed = self.log.open(settings.resume)
        if self.resumed:
            self.trials.announce(self.resumed)
        self.best_compile: Measurement | None = None

    @property
    def plan(self) -> Plan:
        return self.trials.plan

    def run(self) -> Climbed:
        trials = self.trials
        try:
            self._baseline()
            self._compile_baselines()
            *first, others = candidates(self.settings, trials.machine, trials.training)
            for group in first:
                self._try_all("trial", [Plan((rung,)) for rung in group])
                self._second_look()
            self._try_all("trial", [Plan((rung,)) for rung in others])
            self._second_look()
            if self.settings.ablate:
                self._ablate()
        finally:
            trials.close()
        return self._finish(self._final_race())

    def _final_race(self) -> Measurement:
        trials = self.trials
        trials.announce("the final race")
        barred = [name for name in RUNGS if not may_try(name, self.settings, trials.training)]
        barred += map(str, self.settings.without)
        final = run_race(trials.setups, trials.spec, self.log, self.plan, self._rivals(), barred)
        return trials.report(final)

    def _finish(self, final: Measurement) -> Climbed:
        target = self.settings.target
        return Climbed(
            replace(Plan.parse(final.plan), objective=self.settings.objective.value),
            tuple(self.log.rows),
            self.trials.machine,
            target=target.sentence(final) if target else "",
            missed_target=target is not None and not target.reached(final),
            resumed=self.resumed,
        )

    # Baselines

    def _baseline(self) -> None:
        trials = self.trials
        known = self.log.recall("baseline")
        if known is not None:
            trials.report(known)
            return
        trials.announce("timing the model as it is")
        arm = trials.incumbent.arm()
        if arm.failed_score is not None:
            raise WorkloadError(
                f"{trials.spec.label}: the untouched model fails its own gate ({arm.failed_score}): check whether its "
                "output is random or not finite, and whether the limit is below the error of its own arithmetic."
            )
        (samples,) = take_turns([arm], trials.spec)
        trials.record("baseline", self.plan, "baseline", "the model as it is", arm, samples)

    def _compile_baselines(self) -> None:
        """Times torch.compile on the untouched model, because beating eager alone proves nothing."""
        device = self.trials.machine.device.partition(":")[0]
        plans = [Plan.parse(f"compile(mode={mode})") for mode in _COMPILE_MODES[device]]
        self.trials.prepare([(plan, plan) for plan in plans if self.trials.needs_timing("compile", plan)])
        for plan in plans:
            if self.budget.is_spent:
                break
            row = self.trials.measure("compile", plan, plan)
            if row.samples and (self.best_compile is None or _step_s(row) < _step_s(self.best_compile)):
                self.best_compile = row
        self.trials.setups.discard()

    def _rivals(self) -> list[Plan]:
        """Returns the plans that the final plan is timed against: eager, the best torch.compile, and bf16 if it ran."""
        rivals = [Plan()]
        if self.best_compile is not None:
            rivals.append(Plan.parse(self.best_compile.plan))
        if any(row.rung == "bf16" and row.samples for row in self.log.rows):
            rivals.append(Plan.parse("bf16"))
        return rivals

    # One rung at a time

    def _try_all(self, role: str, additions: list[Plan]) -> None:
        trials = self.trials
        for index, added in enumerate(additions):
            if trials.needs_timing(role, added) and not trials.setups.has(trials.candidate(added)):
                upcoming = list(self._upcoming(role, additions[index:]))
                trials.prepare([(one, trials.candidate(one)) for one in upcoming])
            self._try(role, added)
        trials.setups.discard()

    def _upcoming(self, role: str, additions: list[Plan]) -> Iterator[Plan]:
        """Yields the next additions to time, up to one with a resumed result, which may change the incumbent."""
        for added in additions:
            if self.log.knows(role, str(added), str(self.plan)):
                return
            if self.trials.needs_timing(role, added):
                yield added

    def _try(self, role: str, added: Plan) -> None:
        """Tries a rung on top of the incumbent plan; if it fails, tries the fallbacks that the rung suggests."""
        trials = self.trials
        candidate = trials.candidate(added)
        if candidate == self.plan:
            return
        if reason := next(filter(None, (rung.why_not(trials.machine) for rung in added.rungs)), ""):
            known = self.log.recall(role, str(added), str(self.plan))
            if known is not None:
                trials.report(known)
            else:
                trials.record(role, candidate, "unavailable", reason, rung=str(added), against=str(self.plan))
            return
        if reason := self._why_untried(added, candidate):
            trials.record(role, candidate, "unmeasured", reason, rung=str(added))
            return
        row = trials.measure(role, added, candidate)
        if row.verdict == "kept":
            trials.incumbent.replace_plan(Plan.parse(row.plan))
        if len(added.rungs) == 1:
            for rungs in added.rungs[0].fallbacks(row.verdict, trials.training):
                if all(may_try(rung.name, self.settings, trials.training) for rung in rungs):
                    self._try(role, Plan.of(rungs))

    def _why_untried(self, added: Plan, candidate: Plan) -> str:
        if self.trials.is_target_reached():
            return "the target was reached"
        if self.budget.is_spent:
            return "the budget was spent"
        limit_s = self.trials.limit_s(added, candidate)
        if searches_kernels(added) and not self.budget.is_worth_a_search(limit_s):
            return f"an earlier search for kernels did not end within {self.budget.search_s:.0f} s, and less is left"
        return ""

    def _second_look(self) -> None:
        """Tries rungs once more that were dropped before a compiler was kept: they may help under the compiler."""
        asked = {row.rung for row in self.log.rows if row.role == "second look"}
        rows = [row for row in self.log.rows if row.role == "trial"]
        kept_late = [i for i, row in enumerate(rows) if row.verdict == "kept" and _stage(row) >= Stage.COMPILE]
        early = [
            Plan.parse(row.rung)
            for row in rows[: kept_late[-1] if kept_late else 0]
            if row.verdict == "dropped" and _stage(row) < Stage.COMPILE and row.rung not in asked
        ]
        self._try_all("second look", [added for added in early if not any(r.name in self.plan for r in added.rungs)])

    # Ablation

    def _ablate(self) -> None:
        """Measures the plan without each of its rungs, and drops the rungs that add no gain to the whole plan."""
        trials = self.trials
        rungs = self.plan.rungs if len(self.plan.rungs) > 1 else ()
        for index, rung in enumerate(rungs):
            known = [self.log.knows("ablation", str(one), str(self.plan)) for one in rungs[index:]]
            if not known[0] and not trials.setups.has(self.plan.without(rung.name)):
                upcoming = rungs[index:][: [*known, True].index(True)]
                trials.prepare([(one, self.plan.without(one.name)) for one in upcoming])
            if rung.name not in self.plan:
                continue  # an earlier plan without this rung has replaced the incumbent
            smaller = self.plan.without(rung.name)
            if self.budget.is_spent:
                trials.record("ablation", smaller, "unmeasured", "the budget was spent", rung=str(rung))
                continue
            row = trials.ablate(rung, smaller)
            if row.verdict == "dropped":
                trials.incumbent.replace_plan(Plan.parse(row.plan))


def _stage(row: Measurement) -> Stage:
    return max(rung.stage for rung in Plan.parse(row.rung).rungs)


def _step_s(row: Measurement) -> float:
    return geometric_mean_s(row.samples)
