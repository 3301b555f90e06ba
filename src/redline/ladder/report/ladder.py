"""Computes the rows of the ladder table: one row per measurement, with all derived values.

Rows whose gates failed or whose proof is empty have no speed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement
from redline.ladder.report.roofline import place
from redline.ladder.statistics import Interval, median
from redline.machine.load import is_contended
from redline.notation import split_outside_brackets


@dataclass(frozen=True)
class Row:
    """One row of the ladder; None means not measured or not applicable."""

    rung: str
    plan: str
    role: str
    verdict: str
    reason: str
    # The time that the objective is about; `statistic` is "p99" or "median". `calls` is the number of calls for p99.
    time_s: float | None
    low_s: float | None
    high_s: float | None
    statistic: str
    calls: int | None
    # Requests per second of all concurrent callers, for the objective requests.
    requests_per_s: float | None
    # The plan that was measured alternately with this one, and its time from the same turns.
    against: str
    against_s: float | None
    # Speed-up over the plan `against`, and over the original model.
    over_last: Interval | None
    over_start: float | None
    peak_bytes: int | None
    quality: str
    share: float | None
    setup_s: float | None
    setup_cached: bool
    # Number of calls after which the set-up has paid off; None if it never does.
    break_even: float | None
    proof: str


def ladder_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Returns the rows of one climb in the order of measurement."""
    baseline = next((m for m in measurements if m.role == "baseline"), None)
    starts = over_starts(measurements)
    cold = [m for m in measurements if timed(m) and not m.setup_cached and m.shapes[0] in m.setup_s]
    cold_s = {m.plan: m.setup_s[m.shapes[0]] for m in cold}
    return [_row(m, start, baseline, cold_s) for m, start in zip(measurements, starts, strict=True)]


def over_starts(measurements: Sequence[Measurement]) -> list[float | None]:
    """Returns the speed-up of each measurement over the baseline: a product of speed-ups between interleaved plans.

    The speed of a machine drifts during a climb. Interleaved measurements drift together, so a product of their ratios
    is accurate, whereas a ratio of two medians measured minutes apart is not.
    """
    baseline = next((m for m in measurements if m.role == "baseline"), None)
    known: dict[str, float] = {}
    found: list[float | None] = []
    for m in measurements:
        start = None
        if m.role == "baseline" or (baseline is not None and m.plan == baseline.plan):
            start = 1.0 if timed(m) else None
        elif baseline is not None and timed(m):
            last = speedup(m)
            if last is not None and m.against in known:
                start = last.middle * known[m.against]
            elif last is not None and m.against == baseline.plan:
                start = last.middle
            else:
                start = _ratio_of_medians(baseline, m)
        if start is not None and (m.role == "baseline" or m.plan not in known):
            known[m.plan] = start
        found.append(start)
    return found


def timed(measurement: Measurement) -> bool:
    """Returns whether the time may be shown: there are samples and no gate failed."""
    usable = bool(measurement.samples) and all(map(_positive, measurement.samples.values()))
    return usable and measurement.verdict != "refused" and all(score.passed for score in measurement.scores)


def speedup(measurement: Measurement) -> Interval | None:
    """Returns the speed-up over the interleaved plan; None if there is none or the time may not be shown."""
    against = [measurement.against_samples[s] for s in measurement.shapes if measurement.against_samples.get(s)]
    return measurement.speedup() if timed(measurement) and all(map(_positive, against)) else None


def against_s(measurement: Measurement, shape: str | None = None) -> float | None:
    """Returns the time of the plan that was measured alternately with this plan; None if `speedup` is None."""
    if speedup(measurement) is None:
        return None
    seconds = measurement.against_s(shape)
    return None if math.isnan(seconds) else seconds


def time_name(measurement: Measurement) -> str:
    """Returns what the times of a climb are: of a step, of the slowest calls, or of a request among concurrent ones."""
    if measurement.callers:
        return f"Time per request of {measurement.callers} concurrent callers"
    return "99th percentile of a call" if measurement.is_tail else "Time per step"


def shapes_sentence(measurement: Measurement) -> str:
    """Returns a sentence that says which input shapes the figures are for; empty for the default shape."""
    shapes = [shape or "as given" for shape in measurement.shapes]
    if shapes in ([], ["as given"]):
        return ""
    if len(shapes) == 1:
        return f"All figures are for {shapes[0]}."
    return f"Times are for {shapes[0]}; ratios are the geometric mean over {' and '.join(shapes)}."


def load_sentence(measurements: Sequence[Measurement]) -> str:
    """Returns a warning if other processes used the machine while the rows were timed, else an empty string."""
    loads = [
        (m.load["other_cores"], m.load.get("preemptions_per_s", 0.0)) for m in measurements if "other_cores" in m.load
    ]
    cores = measurements[0].machine.get("cores") if measurements else None
    if not loads or not isinstance(cores, int):
        return ""
    others, preemptions = (median(values) for values in zip(*loads, strict=True))
    device = str(measurements[0].machine.get("device", "cpu"))
    if not is_contended(others, cores, device.startswith("cuda")):
        return ""
    return (
        f"Other processes used {others:.1f} of {cores} cores, and preempted the plans {preemptions:.0f} times a "
        "second: intervals are wide, and only ratios within a row can be compared. Climb again on a quiet machine."
    )


def worst_score(scores: Sequence[Score]) -> Score | None:
    """Returns the worst score: first NaN, then a failed score, then the one closest to its limit."""

    def badness(score: Score) -> tuple[bool, bool, float]:
        if math.isnan(score.value):
            return (True, True, 0.0)
        return (False, not score.passed, _share_of_limit(score))

    return max(scores, key=badness, default=None)


def error_share(scores: Sequence[Score]) -> float:
    """Returns how much of its limit the worst score uses: 0 for an exact output, 1 for a score at its limit."""
    return max((max(0.0, _share_of_limit(score)) for score in scores), default=0.0)


def _share_of_limit(score: Score) -> float:
    spent, allowed = score.value, score.limit
    if score.better == "higher":
        # The perfect score of a similarity is 1, so distances from 1 are compared.
        similarity = score.limit < 1
        spent, allowed = (1 - spent, 1 - allowed) if similarity else (allowed, spent)
    return spent / allowed if allowed > 0 else 0.0


def format_score(score: Score) -> str:
    """Returns, for example, `relative error 0.0031 ≤ 0.02` (`>` if the score failed)."""
    return f"{score_name(score)} {score_text(score)}"


def score_name(score: Score) -> str:
    return score.metric.replace("_", " ")


def score_text(score: Score) -> str:
    """Returns the value of a score and its limit."""
    if math.isnan(score.value):
        return "NaN"
    good, bad = ("≤", ">") if score.better == "lower" else ("≥", "<")
    # A score close to 1 needs more digits than an error to show the difference.
    digits = 7 if score.better == "higher" and score.value < 10 else 3
    return f"{score.value:.{digits}g} {good if score.passed else bad} {score.limit:g}"


def rung_names(text: str) -> list[str]:
    """Returns the names of the rungs in a plan such as `fp16 + grad_scaler(init_scale=64)`."""
    return [part.partition("(")[0].strip() for part in split_outside_brackets(text, "+")]


def _positive(values: Sequence[float]) -> bool:
    return bool(values) and all(math.isfinite(value) and value > 0 for value in values)


def _row(m: Measurement, over_start: float | None, baseline: Measurement | None, cold_s: Mapping[str, float]) -> Row:
    shown = timed(m)
    interval = m.time_interval_s() if shown and len(m.samples[m.shapes[0]]) > 1 else None
    roofline = place(m) if shown else None
    worst = worst_score(m.scores)
    return Row(
        rung=m.rung,
        plan=m.plan,
        role=m.role,
        verdict=m.verdict,
        reason=m.reason,
        time_s=m.time_s() if shown else None,
        low_s=interval.low if interval else None,
        high_s=interval.high if interval else None,
        statistic=m.statistic,
        calls=len(m.samples[m.shapes[0]]) if shown and m.is_tail else None,
        requests_per_s=m.requests_per_s() if shown and m.callers else None,
        against=m.against,
        against_s=against_s(m),
        over_last=speedup(m),
        over_start=over_start,
        peak_bytes=m.peak_bytes if m.peak_bytes > 0 else None,
        quality=format_score(worst) if worst else "",
        share=roofline.share if roofline else None,
        setup_s=m.setup_s.get(m.shapes[0] if m.shapes else ""),
        setup_cached=m.setup_cached,
        break_even=_break_even(m, over_start, baseline, cold_s),
        proof="; ".join(filter(None, (m.proof.get(name, "") for name in rung_names(m.rung)))),
    )


def _break_even(
    m: Measurement, over_start: float | None, baseline: Measurement | None, cold_s: Mapping[str, float]
) -> float | None:
    """Returns after how many calls the set-up has paid off; counts the time of a set-up without compiler cache.

    Returns None for p99, because a gain of the slowest calls says little about the time of all calls.
    """
    if baseline is None or over_start is None or over_start <= 1 or m.role == "baseline" or m.is_tail:
        return None
    shape = m.shapes[0]
    setup_s = m.setup_s.get(shape) if not m.setup_cached else cold_s.get(m.plan)
    if setup_s is None or not baseline.samples.get(shape):
        return None
    extra_s = setup_s - baseline.setup_s.get(shape, 0.0)
    saved_s = baseline.median_s(shape) * (1 - 1 / over_start)
    return max(0.0, extra_s / saved_s)


def _ratio_of_medians(baseline: Measurement, m: Measurement) -> float | None:
    shared = [s for s in m.shapes if m.samples[s] and baseline.samples.get(s)]
    logs = [math.log(baseline.time_s(s) / m.time_s(s)) for s in shared]
    return math.exp(sum(logs) / len(logs)) if logs else None
