"""The Pareto front: which plans are on it, how they are named, and what keeps a plan off it."""

from dataclasses import replace
from typing import Any

from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement
from redline.ladder.report import pareto_front

MIB = 2**20


def row(plan: str, speed: float = 1.0, mib: float = 100, error: float = 0.0, **about: Any) -> Measurement:
    """A plan that was timed in turns with eager, with a little noise."""
    noise = [1 + 0.001 * (turn % 5) for turn in range(20)]
    values: dict[str, Any] = {"role": "trial", "verdict": "dropped", "against": "eager", "reason": ""}
    return Measurement(
        workload="w",
        plan=plan,
        machine={"device": "cuda:0"},
        samples={"": tuple(n / speed for n in noise)},
        against_samples={"": tuple(reversed(noise))},
        peak_bytes=int(mib * MIB),
        scores=(Score("relative_error", error, 0.02, "lower", error <= 0.02),),
        **{**values, **about},
    )


EAGER = replace(row("eager", role="baseline", verdict="baseline"), against="", against_samples={})


def front(*rows: Measurement) -> list[tuple[str, str]]:
    return [(point.plan, point.name) for point in pareto_front([EAGER, *rows])]


def final(plan: str, *given: Any) -> Measurement:
    return row(plan, *given, role="final", verdict="kept")


def test_each_plan_is_best_at_something() -> None:
    rows = (row("bf16", 1.5, 60, 0.003), row("int8", 1.2, 40, 0.008), final("compile", 2.0, 120, 0.004))
    assert front(*rows) == [
        ("compile", "fastest"),
        ("bf16", "between"),
        ("int8", "smallest"),
        ("eager", "most exact"),
    ]
    points = pareto_front([EAGER, *rows])
    assert [point.is_answer for point in points] == [True, False, False, False]
    assert [point.file_name for point in points][::3] == ["1-fastest.toml", "4-most-exact.toml"]
    assert 1.98 < points[0].speed.low < points[0].speed.middle < 2.02 and points[0].error_share == 0.2


def test_a_plan_that_another_one_beats_or_equals_is_not_on_it() -> None:
    answer = final("compile", 2.0, 50, 0.0001)
    assert front(answer) == [("compile", "fastest, smallest, most exact")]  # the error is one of rounding
    assert pareto_front([EAGER, answer])[0].file_name == "1-fastest-smallest-most-exact.toml"
    # Within the noise as fast and as small as the answer, or worse at everything.
    assert front(row("tf32", 2.01, 49.5), row("bf16", 1.5, 60, 0.001), answer) == front(answer)


def test_a_faster_trial_counts_only_beyond_its_noise() -> None:
    answer = final("compile", 2.0, 50, 0.0001)
    unsure = row("tf32", 1.05, 50, against="compile")
    wild = [1.0 + 0.5 * (turn % 3 - 1) for turn in range(20)]
    noisy = replace(unsure, samples={"": tuple(wild)}, against_samples={"": tuple(1.05 * w for w in reversed(wild))})
    assert front(noisy, answer) == [("compile", "fastest, smallest, most exact")]
    assert front(unsure, answer)[0] == ("tf32", "fastest, smallest, most exact")
    # The final race, not the chain of trials, says how fast a raced plan is.
    assert front(row("compile", 3.0, 50), answer) == front(answer)


def test_red_gates_and_plans_above_the_memory_limit_are_not_on_it() -> None:
    answer = final("compile", 1.2, 90, 0.001)
    wrong = row("bf16", 3.0, 10, 0.5, verdict="refused")
    large = row("fp16", 3.0, 300, 0.002)
    assert ("fp16", "fastest") in front(wrong, large, answer) and "bf16" not in dict(front(wrong, large, answer))
    limited = [replace(m, max_bytes=95 * MIB) for m in (EAGER, wrong, large, answer)]
    assert [point.plan for point in pareto_front(limited)] == ["compile"]
    assert pareto_front([replace(EAGER, samples={})]) == ()
