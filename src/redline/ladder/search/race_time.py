"""Estimates the time to reserve for the final race, in which the best plans (the racers) are timed in turns.

The time includes setting up the racers, judging their outputs on fresh inputs, and the turns.
"""

from collections.abc import Sequence

from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import FRESH_SEEDS, TrialSpec, geometric_mean_s
from redline.ladder.plan import Plan
from redline.ladder.search.estimates import Estimates
from redline.ladder.search.incumbent import Incumbent


def race_s(
    rows: Sequence[Measurement], spec: TrialSpec, estimates: Estimates, incumbent: Incumbent, sampling_s: float
) -> float:
    """Returns the expected seconds of the final race. `sampling_s` is the time for the turns of two plans."""
    racers = max(2, incumbent.alive_count)
    missing = [plan for plan in {Plan(), incumbent.plan} if not incumbent.is_alive(plan)]
    # The untouched model is usually by far the slowest racer, so its step time determines how long the race takes.
    step_s = slow_step_s(rows)
    judging_s = (racers - 1) * estimates.open_s / 2 + max(estimates.open_s / 2, len(FRESH_SEEDS) * step_s)
    return sum(map(estimates.trial_s, missing)) + judging_s + _turns_s(spec, racers * sampling_s / 2, step_s)


def slow_step_s(rows: Sequence[Measurement]) -> float:
    """Returns the upper quartile of the step times of the untouched model, as the geometric mean over the shapes.

    The median would be too low if other processes load the machine during the race as they did before.
    """
    samples = [row.samples for row in rows if row.plan == str(Plan())]
    samples += [row.against_samples for row in rows if row.against == str(Plan())]
    taken = {label: sorted(s for some in samples for s in some.get(label, ())) for label in rows[0].samples}
    return geometric_mean_s({label: [times[3 * len(times) // 4]] for label, times in taken.items()})


def _turns_s(spec: TrialSpec, allowed_s: float, step_s: float) -> float:
    """Returns the time of the turns, which end early if steps are long (see `take_turns`)."""
    least_s = spec.least_steps * step_s
    needs_all = spec.is_tail or spec.callers
    return max(allowed_s, least_s if needs_all else min(least_s, 1.5 * allowed_s + step_s))
