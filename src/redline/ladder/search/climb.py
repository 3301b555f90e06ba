"""The climb: baselines, then one rung at a time on top of what is kept, second looks, an ablation and a final race.

Every measurement is written to disk as it is made; a climb that is killed goes on with `resume`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redline.errors import WorkloadError
from redline.files.atomic import check_can_write
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import Arm, close, compare_arms, geometric_mean_s, measure_peak, take_turns
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import Comparison
from redline.ladder.plan import Plan, parse_rung
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.budget import Budget, known_compile_s, searches_kernels
from redline.ladder.search.final_race import run_race
from redline.ladder.search.incumbent import Incumbent
from redline.ladder.search.parallel_setups import ParallelSetups, may_stand_beside_others
from redline.ladder.search.run_log import RunLog
from redline.ladder.search.search_order import candidates, check_asked, may_try
from redline.ladder.search.settings import Settings, ask_machine, prepare_trials
from redline.machine.machine import Machine

_COMPILE_MODES = {"cuda": ("default", "reduce-overhead", "max-autotune"), "cpu": ("default",)}


@dataclass(frozen=True)
class Climbed:
    """What came out."""

    plan: Plan
    measurements: tuple[Measurement, ...]
    machine: Machine
    # Whether the plan reached the target, in the final race: a sentence; empty without a target.
    target: str = ""
    missed_target: bool = False
    # What became of the wish to resume: a sentence; empty without it.
    resumed: str = ""

    @property
    def final(self) -> Measurement:
        """The winner's row, which is always the last."""
        return self.measurements[-1]


Listener = Callable[[str, Measurement | None], None]


def climb(settings: Settings, listen: Listener = lambda _text, _row: None) -> Climbed:
    """Climbs; `listen` hears what happens (a line of text, and a measurement when one was made)."""
    with WorkerPool() as pool:
        return _Climb(settings, pool, listen).run()


class _Climb:
    def __init__(self, settings: Settings, pool: WorkerPool, listen: Listener) -> None:
        self.budget = Budget(settings.budget_s, settings.timeout_s)
        self.settings = settings
        self.listen = listen
        check_can_write(settings.folder)
        self.listen("running the untouched model for reference", None)
        # The workload first: a wrong address must not wait for the ceilings to be measured.
        self.spec, facts = prepare_trials(pool, settings, ask_machine(pool, settings.device, measure=False))
        self.listen("reading the machine", None)
        self.machine = ask_machine(pool, settings.device)
        self.training: bool = facts["training"]
        check_asked(settings, self.training)
        self.log = RunLog(self.spec, self.machine, facts, settings.measurements_path)
        self.resumed = self.log.open(settings.resume)
        if self.resumed:
            self.listen(self.resumed, None)
        self.setups = ParallelSetups(pool, self.spec, self.machine)
        self.kept = Incumbent(self.setups, self.spec, lambda text: self.listen(text, None))
        self.best_compile: Measurement | None = None

    @property
    def plan(self) -> Plan:
        return self.kept.plan

    def run(self) -> Climbed:
        try:
            self._baseline()
            self._compile_baselines()
            *first, others = candidates(self.settings, self.machine, self.training)
            for group in first:
                self._try_all("trial", [Plan((rung,)) for rung in group])
                self._second_look()
            self._try_all("trial", [Plan((rung,)) for rung in others])
            self._second_look()
            if self.settings.ablate:
                self._ablate()
        finally:
            self.setups.discard()
            self.kept.close()
        self.listen("the final race", None)
        barred = [name for name in RUNGS if not may_try(name, self.settings, self.training)]
        barred += [str(parse_rung(text)) for text in self.settings.without]
        final = run_race(self.setups, self.spec, self.log, self.plan, self._rivals(), barred)
        self.listen(f"{final.plan}: {final.verdict}", final)
        plan = replace(Plan.parse(final.plan), objective=self.settings.objective)
        target = self.settings.target
        return Climbed(
            plan,
            tuple(self.log.rows),
            self.machine,
            target=target.sentence(final) if target else "",
            missed_target=target is not None and not target.reached(final),
            resumed=self.resumed,
        )

    def _tell(self, row: Measurement) -> Measurement:
        self.listen(f"{row.rung or row.plan}: {row.verdict}", row)
        return row

    def _record(self, role: str, plan: Plan, verdict: str, reason: str, *seen: Any, **values: Any) -> Measurement:
        return self._tell(self.log.record(self.log.row(role, plan, verdict, reason, *seen, **values)))

    def _target_reached(self) -> bool:
        target = self.settings.target
        kept = (row for row in self.log.rows if row.verdict == "kept" or row.role == "baseline")
        return target is not None and any(map(target.reached, kept))

    # Baselines

    def _baseline(self) -> None:
        known = self.log.recall("baseline")
        if known is not None:
            self._tell(known)
            return
        self.listen("timing the model as it is", None)
        arm = self.kept.arm()
        if not arm.passed:
            red = next(score for score in arm.scores if not score.passed)
            raise WorkloadError(
                f"{self.settings.workload}: the untouched model fails its own gate ({red}); is its output "
                "random or not finite, or the limit below what its arithmetic can reach?"
            )
        (samples,) = take_turns([arm], self.spec)
        self._record("baseline", self.plan, "baseline", "the model as it is", arm, samples)

    def _compile_baselines(self) -> None:
        """torch.compile on the untouched model: beating eager alone proves nothing."""
        plans = [Plan.parse(f"compile(mode={mode})") for mode in _COMPILE_MODES[self.machine.device.partition(":")[0]]]
        self._prepare([(plan, plan) for plan in plans if self._will_be_timed("compile", plan)])
        for plan in plans:
            if self.budget.is_spent:
                break
            row = self._trial("compile", plan, plan)
            if row.samples and (self.best_compile is None or _typical_s(row) < _typical_s(self.best_compile)):
                self.best_compile = row
        self.setups.discard()

    def _rivals(self) -> list[Plan]:
        """Who the final plan races: eager, the best torch.compile, and eager bf16 where it ran."""
        plans = [Plan()]
        if self.best_compile is not None:
            plans.append(Plan.parse(self.best_compile.plan))
        if any(row.rung == "bf16" and row.samples for row in self.log.rows):
            plans.append(Plan.parse("bf16"))
        return plans

    # One rung at a time

    def _try_all(self, role: str, additions: list[Plan]) -> None:
        for index, added in enumerate(additions):
            if self._will_be_timed(role, added) and not self.setups.stands(self._with(added)):
                self._prepare([(one, self._with(one)) for one in self._next_ones(role, additions[index:])])
            self._step(role, added)
        self.setups.discard()

    def _next_ones(self, role: str, additions: list[Plan]) -> Iterator[Plan]:
        """Those whose turn comes; none behind one that a resumed climb knows, which may have been kept."""
        for added in additions:
            if self.log.knows(role, str(added), str(self.plan)):
                return
            if self._will_be_timed(role, added):
                yield added

    def _prepare(self, changes: Sequence[tuple[Plan | Rung, Plan]]) -> None:
        """Sets up the first of these plans at once, as if none changed the kept one; after one that does, anew."""
        self.setups.discard()
        room = self.setups.at_once(max(row.peak_bytes for row in self.log.rows))
        together = may_stand_beside_others([plan for _, plan in changes])
        next_ones = [(change, plan) for change, plan in changes if plan in together][:room]
        if len(next_ones) < 2 or changes[0][1] not in together or self.budget.is_spent or self._target_reached():
            return
        self.listen(f"setting up {len(next_ones)} plans side by side", None)
        try:
            self.kept.arm()  # it has to stand in any case, and must not be the one that finds no memory
        except WorkerFailed:
            return
        self.setups.prepare({str(plan): self._limit_s(change, plan) for change, plan in next_ones})

    def _limit_s(self, added: Plan | Rung, candidate: Plan) -> float:
        return self.budget.for_trial_s(added, known_compile_s(candidate, self.log.rows))

    def _will_be_timed(self, role: str, added: Plan) -> bool:
        candidate = self._with(added)
        return not (
            str(candidate) == str(self.plan)
            or any(rung.why_not(self.machine) for rung in added.rungs)
            or self.log.knows(role, str(added), str(self.plan))
            or self._baseline_run(role, candidate) is not None
        )

    def _with(self, added: Plan) -> Plan:
        candidate = self.plan
        for rung in added.rungs:
            candidate = candidate.with_rung(rung)
        return candidate

    def _step(self, role: str, added: Plan) -> None:
        """Tries a rung on top of what is kept, or a few that only make sense together."""
        candidate = self._with(added)
        if str(candidate) == str(self.plan):
            return
        about = {"rung": str(added), "against": str(self.plan)}
        if reason := next(filter(None, (rung.why_not(self.machine) for rung in added.rungs)), ""):
            known = self.log.recall(role, str(added), str(self.plan))
            self._tell(known) if known else self._record(role, candidate, "unavailable", reason, **about)
            return
        if self._target_reached():
            self._record(role, candidate, "unmeasured", "the target was reached", rung=str(added))
            return
        if self.budget.is_spent:
            self._record(role, candidate, "unmeasured", "the budget was spent", rung=str(added))
            return
        if searches_kernels(added) and not self.budget.is_worth_a_search(self._limit_s(added, candidate)):
            reason = f"a search over kernels did not end within {self.budget.search_s:.0f} s before, and now has less"
            self._record(role, candidate, "unmeasured", reason, rung=str(added))
            return
        row = self._trial(role, added, candidate)
        if row.verdict == "kept":
            self.kept.keep(row.plan)
        if len(added.rungs) == 1:
            for rungs in added.rungs[0].instead(row.verdict, self.training):
                if all(may_try(rung.name, self.settings, self.training) for rung in rungs):
                    self._step(role, Plan.of(rungs))

    def _trial(self, role: str, added: Plan, candidate: Plan, again: bool = True) -> Measurement:
        """Measures the candidate against the kept plan; every failure is a row with its reason."""
        known = self.log.recall(role, str(added), str(self.plan))
        if known is not None:
            return self._tell(known)
        about: dict[str, Any] = {"rung": str(added), "against": str(self.plan)}
        measured = self._measured_as_baseline(role, added, candidate)
        if measured is not None:
            return measured
        self.listen(f"trying {added}", None)
        arm: Arm | None = None
        limit_s = self._limit_s(added, candidate)
        try:
            incumbent, arm = self._open_beside(candidate, limit_s)
            if not arm.passed:
                red = next(score for score in arm.scores if not score.passed)
                return self._record(role, arm.plan, "refused", f"outside the gate: {red}", arm, **about)
            measure_peak(arm, self.spec)
            notes: tuple[str, ...] = ()
            if incumbent is not None:
                old, new = take_turns([incumbent, arm], self.spec)
            else:
                (new,) = take_turns([arm], self.spec)
                close(arm)
                incumbent = self.kept.arm()
                (old,) = take_turns([incumbent], self.spec)
                notes = ("both plans do not fit in memory together, so they were timed one after the other",)
            better, reason = self.spec.objective.judge(compare_arms(incumbent, arm, old, new))
            verdict = "kept" if better else "dropped"
            if role == "compile":
                verdict, reason = "baseline", f"torch.compile on the untouched model; {reason}"
            row = self._record(role, arm.plan, verdict, reason, arm, new, old, notes, **about)
            if verdict == "kept" and not notes:
                self.kept.take_over(arm)
                arm = None
            return row
        except WorkerFailed as failure:
            close(arm)
            if self.kept.lost_process(failure) and again:
                return self._trial(role, added, candidate, again=False)
            if failure.kind == "timeout" and searches_kernels(added):
                self.budget.search_s = max(self.budget.search_s, limit_s)
            verdict = failure.kind if failure.kind in ("unavailable", "refused") else "failed"
            text = f"out of memory: {failure}" if failure.kind == "oom" else str(failure)
            # Without an arm it was the set-up that took too long; later on it is a hang, whatever the budget.
            if arm is None and failure.kind == "timeout" and limit_s < self.settings.timeout_s:
                verdict, text = "unmeasured", f"{text}, for want of budget"
            return self._record(role, candidate, verdict, text, **about)
        finally:
            close(arm)

    def _baseline_run(self, role: str, candidate: Plan) -> Measurement | None:
        if self.plan.rungs or role != "trial":
            return None
        row = next((r for r in self.log.rows if r.role == "compile" and r.plan == str(candidate)), None)
        done = row is not None and (row.speedup() is not None or row.verdict in ("failed", "unmeasured"))
        return row if done else None

    def _measured_as_baseline(self, role: str, added: Plan, candidate: Plan) -> Measurement | None:
        """torch.compile alone has already been timed against eager as the second baseline: once is enough."""
        row = self._baseline_run(role, candidate)
        if row is None:
            return None
        ratio = row.speedup()
        # What failed would fail again with what is left of the budget, and sooner.
        verdict, reason = row.verdict, row.reason
        if ratio is not None:
            comparison = Comparison(ratio, row.peak_bytes, self.log.rows[0].peak_bytes, self.spec.device)
            better, reason = self.spec.objective.judge(comparison)
            verdict = "kept" if better else "dropped"
        again = replace(row, role=role, rung=str(added), verdict=verdict, reason=f"{reason} (the baseline's run)")
        return self._tell(self.log.record(again))

    def _open_beside(self, candidate: Plan, timeout_s: float) -> tuple[Arm | None, Arm]:
        """The kept plan and the candidate, side by side; on a GPU too small for both, the candidate alone."""
        incumbent = self.kept.arm()
        try:
            return incumbent, self.setups.open(candidate, timeout_s=timeout_s)
        except WorkerFailed as failure:
            if failure.kind != "oom" or not self.machine.is_cuda:
                raise
        self.kept.close()
        return None, self.setups.open(candidate, timeout_s=timeout_s)

    def _second_look(self) -> None:
        """What did not help alone may help under a compiler that was kept after it was tried; it is asked once."""
        asked = {row.rung for row in self.log.rows if row.role == "second look"}
        rows = [row for row in self.log.rows if row.role == "trial"]
        kept_late = [i for i, row in enumerate(rows) if row.verdict == "kept" and _stage(row) >= Stage.COMPILE]
        early = [
            Plan.parse(row.rung)
            for row in rows[: kept_late[-1] if kept_late else 0]
            if row.verdict == "dropped" and _stage(row) < Stage.COMPILE and row.rung not in asked
        ]
        self._try_all("second look", [added for added in early if not any(r.name in self.plan for r in added.rungs)])

    # What each rung is worth in the end

    def _ablate(self) -> None:
        """Removes each kept rung once: what it is worth in the final plan, and out if that is nothing."""
        rungs = self.plan.rungs if len(self.plan.rungs) > 1 else ()
        for index, rung in enumerate(rungs):
            known = [self.log.knows("ablation", str(one), str(self.plan)) for one in rungs[index:]]
            if not known[0] and not self.setups.stands(self.plan.without(rung.name)):
                next_ones = rungs[index:][: [*known, True].index(True)]
                self._prepare([(one, self.plan.without(one.name)) for one in next_ones])
            if rung.name not in self.plan:
                continue  # the kept plan was lost on the way, and this rung with it
            smaller = self.plan.without(rung.name)
            if self.budget.is_spent:
                self._record("ablation", smaller, "unmeasured", "the budget was spent", rung=str(rung))
                continue
            row = self._ablation(rung, smaller)
            if row.verdict == "dropped":
                self.kept.keep(row.plan)

    def _ablation(self, rung: Rung, smaller: Plan, again: bool = True) -> Measurement:
        """Verdict "dropped" when the plan is as good without the rung."""
        known = self.log.recall("ablation", str(rung), str(self.plan))
        if known is not None:
            return self._tell(known)
        self.listen(f"removing {rung}", None)
        about: dict[str, Any] = {"rung": str(rung), "against": str(self.plan)}
        arm: Arm | None = None
        try:
            whole = self.kept.arm()
            arm = self.setups.open(smaller, timeout_s=self._limit_s(rung, smaller))
            if not arm.passed:
                return self._record("ablation", smaller, "kept", "the gate is red without it", arm, **about)
            measure_peak(arm, self.spec)
            old, new = take_turns([whole, arm], self.spec)
            # Turned round: the plan with the rung has to be better than the plan without it.
            worth, gain = self.spec.objective.judge(compare_arms(arm, whole, new, old))
            reason = f"{'worth it in the whole plan' if worth else 'made useless by the others'}: {gain}"
            row = self._record("ablation", arm.plan, "kept" if worth else "dropped", reason, arm, new, old, **about)
            if not worth:
                self.kept.take_over(arm)
                arm = None
            return row
        except WorkerFailed as failure:
            close(arm)
            if self.kept.lost_process(failure) and again:
                return self._ablation(rung, smaller, again=False)
            verdict = "unmeasured" if failure.kind in ("oom", "timeout", "lost") else "kept"
            said = "not measured" if verdict == "unmeasured" else "the others do not run without it"
            return self._record("ablation", smaller, verdict, f"{said}: {failure}", **about)
        finally:
            close(arm)


def _stage(row: Measurement) -> Stage:
    return max(rung.stage for rung in Plan.parse(row.rung).rungs)


def _typical_s(row: Measurement) -> float:
    return geometric_mean_s(row.samples)


__all__ = ["Climbed", "Settings", "climb"]
