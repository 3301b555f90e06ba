"""The steps of a climb: eager, openings (plans an expert would type), single rungs, ablation, compile, final race.

Whenever the climb stops, the best plan so far goes into the final race. Every measurement is written to disk as it is
made, so that a killed climb can be resumed.
"""

import time
from dataclasses import replace
from typing import Any

from redline.errors import WorkloadError
from redline.files.atomic import check_can_write
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.objective import above_limit, is_within
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.budget import Budget
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.estimates import kind_of
from redline.ladder.search.final_race import run_race
from redline.ladder.search.openings import ENGINES, openings
from redline.ladder.search.progress import Progress
from redline.ladder.search.race_time import race_s
from redline.ladder.search.run_log import added_rungs, plan_of
from redline.ladder.search.search_order import by_gain_per_second, candidates, check_asked, may_try, variants
from redline.ladder.search.settings import Settings
from redline.ladder.search.trials import Trials
from redline.notation import format_seconds

# torch.compile as a user would type it, which the table of results shows for comparison.
_COMPILE_BASELINE = {"cuda": "compile(mode=reduce-overhead)", "cpu": "compile"}
# The largest share of the budget that timing may take in one comparison, and in the final race.
_SAMPLING_SHARE, _RACE_SHARE = 0.04, 0.06
# The longest time for trying all sizes of the ranges of shapes, and its largest share of the budget.
_LONGEST_SWEEP_S, _SWEEP_SHARE = 30.0, 0.1
# The trial of a number of threads, or of an opening without compilation, is started if at least this share of its
# expected time is left, because estimates are rough. At the end of the climb, when there is nothing else to try, the
# share also applies to openings with compilation.
_START_SHARE = 0.6
# The budget reserves these seconds to end all processes and write the files, and this share of itself for delays.
_END_S, _END_SHARE = 1.5, 0.02


class Climber:
    """Runs one climb; `run()` returns its result. The budget runs from `started_s`."""

    def __init__(
        self, settings: Settings, pool: WorkerPool, progress: Progress, started_s: float | None = None
    ) -> None:
        if settings.budget_s is not None:
            settings = replace(settings, sampling_s=min(settings.sampling_s, _SAMPLING_SHARE * settings.budget_s))
        self.settings = settings
        self.budget = Budget(settings.budget_s, settings.timeout_s, started_s)
        if settings.folder is not None:
            check_can_write(settings.folder)
        self.trials = Trials(settings, pool, self.budget, progress)
        check_asked(settings, self.trials.training)
        self.log = self.trials.log
        self.resumed = self.log.open(settings.resume)
        if self.resumed:
            self.trials.announce(self.resumed)
        self.advice = ""
        # The plans that were compared with an incumbent: each as requested, and with options such as `auto` resolved.
        self._tried: set[Plan] = set()

    @property
    def plan(self) -> Plan:
        return self.trials.plan

    def run(self) -> Climbed:
        trials = self.trials
        try:
            self._baseline()
            self._try_threads()
            self._try_openings()
            self._try_changes()
            if self.settings.ablate:
                self._ablate()
            self._use_what_is_left()
            return self._finish(self._final_race())
        finally:
            trials.close()
            trials.estimates.history.save()

    def _final_race(self) -> Measurement:
        trials = self.trials
        trials.announce("the final race")
        trials.setups.discard()
        barred = [name for name in RUNGS if not may_try(name, self.settings, trials.training)]
        barred += map(str, self.settings.without)
        alive = trials.incumbent.release()
        notes = (self.advice,) if self.advice else ()
        sampling_s = self._race_sampling_s
        ranges = self.settings.ranges
        final = run_race(
            trials.setups, trials.spec, self.log, self.plan, alive, barred, sampling_s, notes, ranges, self._sweep_s
        )
        return trials.report(final)

    @property
    def _race_sampling_s(self) -> float:
        sampling_s = 2 * self.settings.sampling_s
        return sampling_s if self.budget.total_s is None else min(sampling_s, _RACE_SHARE * self.budget.total_s)

    @property
    def _sweep_s(self) -> float:
        """The seconds kept for running the final plan at every size of the shape ranges."""
        total_s = self.budget.total_s
        longest_s = _LONGEST_SWEEP_S if total_s is None else min(_LONGEST_SWEEP_S, _SWEEP_SHARE * total_s)
        return longest_s if self.settings.ranges else 0.0

    def _reserve_race(self) -> None:
        """Reserves the part of the budget that the final race will need."""
        trials = self.trials
        expected_s = race_s(self.log.rows, trials.spec, trials.estimates, trials.incumbent, self._race_sampling_s)
        end_s = _END_S + _END_SHARE * (self.budget.total_s or 0.0)
        self.budget.reserved_s = end_s + expected_s + self._sweep_s

    def _finish(self, final: Measurement) -> Climbed:
        target, limit_bytes = self.settings.target, self.settings.max_bytes
        return Climbed(
            replace(plan_of(final), objective=self.settings.objective.value),
            tuple(self.log.rows),
            self.trials.machine,
            target=target.sentence(final) if target else "",
            missed_target=target is not None and not target.reached(final),
            missed_limit="" if is_within(final.peak_bytes, limit_bytes) else final.reason,
            resumed=self.resumed,
        )

    # Baseline

    def _baseline(self) -> None:
        trials = self.trials
        trials.announce("timing the model as it is")
        start_s = time.monotonic()
        arm = trials.incumbent.arm()
        trials.estimates.open_s = time.monotonic() - start_s
        if arm.failed_score is not None:
            raise WorkloadError(
                f"{trials.spec.label}: the untouched model fails its own gate ({arm.failed_score}): check whether its "
                "output is random or not finite, and whether the limit is below the rounding error of its dtype."
            )
        known = self.log.recall("baseline")
        if known is not None:
            trials.report(known)
            return
        about: dict[str, Any] = {}
        (samples,) = trials.take_turns([arm], about)
        over = not is_within(arm.peak_bytes, self.settings.max_bytes)
        reason = above_limit(arm.peak_bytes, self.settings.max_bytes) if over else "the model as it is"
        trials.record("baseline", self.plan, "baseline", reason, arm, samples, **about)
        if trials.least_timing_s > self.settings.sampling_s:
            calls = f"at least {trials.spec.least_steps:,} calls of each plan"
            trials.announce(
                f"{self.settings.objective} needs {calls}, about {trials.least_timing_s:.0f} s a comparison"
            )

    # Openings

    def _try_threads(self) -> None:
        """Tries different numbers of CPU threads; comes first because it is quick and helps most on a busy machine."""
        if not self.trials.machine.is_cuda and may_try("threads", self.settings, self.trials.training):
            for rung in variants("threads", self.settings, self.trials.machine, self.trials.training):
                self._try("trial", Plan((rung,)), self.trials.candidate(Plan((rung,))), _START_SHARE)

    def _try_openings(self) -> None:
        """Tries the openings; if none of them is kept, tries the alternatives that their rungs suggest."""
        trials = self.trials
        plans = self._openings()
        self._advise(plans)
        self._try_plans(plans)
        failed = [row for row in self.log.rows if row.role == "opening" and row.verdict != "kept"]
        for row in failed:
            plan = added_rungs(row)
            for rungs in [group for rung in plan.rungs for group in rung.fallbacks(row.verdict, trials.training)]:
                if any(name in self.plan for name in ENGINES):
                    break
                if all(may_try(rung.name, self.settings, trials.training) for rung in rungs):
                    alternative = plan
                    for rung in rungs:
                        alternative = alternative.with_rung(rung)
                    self._try("opening", alternative, alternative)
        trials.setups.discard()

    def _openings(self) -> list[Plan]:
        """Returns the openings, each with the kept number of threads if there is one, shortest expected trial first."""
        found = openings(self.settings, self.trials.machine, self.trials.training)
        threads = [rung for rung in self.plan.rungs if rung.name == "threads"]
        return sorted((Plan.of((*threads, *plan.rungs)) for plan in found), key=self.trials.expected_s)

    def _advise(self, plans: list[Plan]) -> None:
        """Reports at the start if the budget is too small for torch.compile, and which budget would be enough."""
        compiled = [plan for plan in plans if "compile" in plan]
        if self.budget.total_s is None or not compiled:
            return
        self._reserve_race()
        expected_s = min(map(self.trials.expected_s, compiled))
        if expected_s <= self.budget.left_s or any(self.log.knows_plan(str(plan)) for plan in compiled):
            return
        # Adds the time of the other openings, and a quarter more because the estimates are rough.
        enough_s = 1.25 * (self.budget.total_s - self.budget.left_s + sum(map(self.trials.expected_s, plans)))
        self.advice = (
            f"the budget of {format_seconds(self.budget.total_s)} is too small for torch.compile, which takes about "
            f"{expected_s:.0f} s here, in addition to the baseline and the final race: a budget of "
            f"{10 * -(-enough_s // 10):.0f} s would be enough"
        )
        self.trials.announce(self.advice)

    def _try_plans(self, plans: list[Plan]) -> None:
        """Tries whole plans one after the other; where possible, sets up the next few in parallel."""
        for index, plan in enumerate(plans):
            if self._is_new("opening", plan) and not self.trials.setups.has(plan):
                self.trials.prepare([p for p in plans[index:] if self._is_new("opening", p)])
            self._try("opening", plan, plan, start_share=1.0 if "compile" in plan else _START_SHARE)

    def _is_new(self, role: str, plan: Plan) -> bool:
        return not self.log.knows(role, str(plan), str(self.plan)) and not self._why_untried(plan)

    # Trials of single rungs

    def _try_changes(self) -> None:
        """Tries the rungs one by one on top of the incumbent, those with the largest expected gain per second first.

        When a compiler is kept, the rungs that were dropped before are tried once more: they may help compiled code.
        """
        trials = self.trials
        left: list[tuple[str, Rung]] = [
            ("trial", rung) for rung in candidates(self.settings, trials.machine, trials.training)
        ]
        searched = self._start_search(left)
        while left:
            left = self._in_order(left)
            role, rung = left.pop(0)
            added = Plan((rung,))
            if self._needs_timing(role, rung) and not trials.setups.has(trials.candidate(added)):
                ahead = [trials.candidate(added)]
                ahead += [trials.candidate(Plan((r,))) for role, r in left if self._needs_timing(role, r)]
                trials.prepare(ahead)
            row = self._try(role, added, trials.candidate(added))
            if row is not None and row.verdict == "kept" and rung.stage >= Stage.COMPILE:
                left += self._second_looks()
        trials.setups.discard()
        if searched is not None and (plan := trials.setups.search.plan) is not None:
            self._try("trial", Plan((searched,)), plan, start_share=0.0)

    def _start_search(self, left: list[tuple[str, Rung]]) -> Rung | None:
        """Starts a kernel search in the background of the other trials; returns the rung that it is for, or None."""
        trials = self.trials
        peak_bytes = max(row.peak_bytes for row in self.log.rows)
        for role, rung in left:
            candidate = trials.candidate(Plan((rung,)))
            known = self.log.knows(role, str(rung), str(self.plan)) or rung.why_not(trials.machine)
            if kind_of(Plan((rung,))) != "search" or known or self._why_untried(candidate):
                continue
            if trials.setups.at_once(peak_bytes, trials.incumbent.alive_count) < 2:
                return None
            trials.announce(f"searching for the fastest kernels of {candidate} in the background")
            trials.setups.search.start(candidate, trials.limit_s(candidate))
            left.remove((role, rung))
            return rung
        return None

    def _in_order(self, left: list[tuple[str, Rung]]) -> list[tuple[str, Rung]]:
        trials = self.trials

        def seconds(rung: Rung) -> float:
            candidate = trials.candidate(Plan((rung,)))
            # A rung that cannot run here, or whose plan is already set up, takes almost no time and so comes first.
            instant = rung.why_not(trials.machine) or trials.setups.has(candidate)
            return 1e-3 if instant else trials.expected_s(candidate)

        roles = {rung: role for role, rung in left}
        history, digest = trials.estimates.history, self.log.facts.digest
        ordered = by_gain_per_second(list(roles), seconds, history, trials.training, digest)
        return [(roles[rung], rung) for rung in ordered]

    def _needs_timing(self, role: str, rung: Rung) -> bool:
        trials, added = self.trials, Plan((rung,))
        candidate = trials.candidate(added)
        return (
            not self._was_tried(candidate)
            and not rung.why_not(trials.machine)
            and not self.log.knows(role, str(added), str(self.plan))
            and not self._why_untried(candidate)
        )

    def _was_tried(self, candidate: Plan) -> bool:
        """Returns whether the plan is the incumbent, or was compared with any incumbent of this climb."""
        return candidate == self.plan or candidate in self._tried

    def _second_looks(self) -> list[tuple[str, Rung]]:
        asked = {row.rung for row in self.log.rows if row.role == "second look"}
        early = {
            row.rung: added_rungs(row).rungs
            for row in self.log.rows
            if row.role == "trial" and row.verdict == "dropped" and row.rung not in asked
        }
        rungs = [rungs[0] for rungs in early.values() if len(rungs) == 1]
        return [("second look", r) for r in rungs if r.stage < Stage.COMPILE and r.name not in self.plan]

    def _try(self, role: str, added: Plan, candidate: Plan, start_share: float = 1.0) -> Measurement | None:
        """Tries a plan against the incumbent; after a single rung, tries the fallbacks that it suggests, if any."""
        trials = self.trials
        if self._was_tried(candidate):
            return None
        about = {"rung": str(added), "against": str(self.plan)}
        if reason := next(filter(None, (rung.why_not(trials.machine) for rung in added.rungs)), ""):
            known = self.log.recall(role, str(added), str(self.plan))
            if known is not None:
                return trials.report(known)
            return trials.record(role, candidate, "unavailable", reason, **about)
        if not self.log.knows(role, str(added), str(self.plan)) and (
            reason := self._why_untried(candidate, start_share)
        ):
            said = any(row.plan == str(candidate) and row.verdict == "unmeasured" for row in self.log.rows)
            return None if said else trials.record(role, candidate, "unmeasured", reason, rung=str(added))
        row = trials.measure(role, added, candidate)
        if row.verdict != "unmeasured":
            self._tried |= {candidate, plan_of(row)}
        if row.verdict == "kept":
            trials.incumbent.replace_plan(plan_of(row))
        if role in ("trial", "second look") and len(added.rungs) == 1:
            for rungs in added.rungs[0].fallbacks(row.verdict, trials.training):
                if all(may_try(rung.name, self.settings, trials.training) for rung in rungs):
                    group = Plan.of(rungs)
                    self._try(role, group, trials.candidate(group))
        return row

    def _why_untried(self, candidate: Plan, start_share: float = 1.0) -> str:
        if self.trials.is_target_reached():
            return "the target was reached"
        self._reserve_race()
        return "" if self.trials.setups.has(candidate) else self.trials.why_too_long(candidate, start_share)

    # Ablation

    def _ablate(self) -> None:
        """Measures the plan without each of its rungs, and drops the rungs that add no gain to the whole plan."""
        trials = self.trials
        rungs = self.plan.rungs if len(self.plan.rungs) > 1 else ()
        for index, rung in enumerate(rungs):
            known = [self.log.knows("ablation", str(one), str(self.plan)) for one in rungs[index:]]
            if not known[0] and not trials.setups.has(self.plan.without(rung.name)):
                upcoming = rungs[index:][: [*known, True].index(True)]
                smaller = [self.plan.without(one.name) for one in upcoming]
                trials.prepare([plan for plan in smaller if not self._why_untried(plan)])
            if rung.name not in self.plan:
                continue  # the rung was removed together with an earlier one
            smaller = self.plan.without(rung.name)
            if not known[0] and (reason := self._why_untried(smaller)):
                trials.record("ablation", smaller, "unmeasured", reason, rung=str(rung))
                continue
            row = trials.ablate(rung, smaller)
            if row.verdict == "dropped":
                trials.incumbent.replace_plan(plan_of(row))

    # The remaining budget

    def _use_what_is_left(self) -> None:
        """Tries a compiled opening if no compiled plan was timed yet; then times torch.compile on the untouched model.

        The report needs torch.compile as a second baseline beside eager, because a plan that is faster than eager but
        slower than torch.compile is no improvement.
        """
        trials = self.trials
        trials.setups.discard()
        baseline = Plan.parse(_COMPILE_BASELINE[trials.machine.device.partition(":")[0]])
        compiled = [row for row in self.log.rows if row.samples and "compile" in plan_of(row)]
        for plan in self._openings():
            if not compiled and "compile" in plan and not self._why_untried(plan, _START_SHARE):
                self._try("opening", plan, plan, _START_SHARE)
                break
        self._try("compile", baseline, baseline)
