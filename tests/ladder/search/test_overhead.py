"""The overhead of a climb beyond the model itself: at most two seconds per trial.

The clock runs from the first trial to the final race, so it sees the trials and nothing else. What the model
took is counted from the measurements alone: each trial's set-up, and its samples with the untimed steps before
each, as `trial` chooses them. All the rest counts as Redline's own, even where the model runs in it: forking,
building, the gate's batches, the proof, the rough time of a step, the peak of memory, statistics, writing.
It is also the one climb of planted rungs in real time.
"""

import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest

import planted_rungs
from redline.ladder.measurement import Measurement
from redline.ladder.search.climb import climb
from redline.ladder.search.preparation import ask_machine

pytestmark = pytest.mark.alone

PLANTED = Path(__file__).parents[2] / "planted_rungs.py"
TRIALS = ("planted_fast", "planted_useless", "planted_slow")
VERDICTS = ("kept", "dropped", "dropped")
ALLOWED_S = 2.0


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    planted_rungs.plant()
    yield
    planted_rungs.uproot()


def in_the_model_s(row: Measurement) -> float:
    """Set-up, and every turn of both arms."""
    turns = [s for arm in (row.samples, row.against_samples) for samples in arm.values() for s in samples]
    return sum(row.setup_s.values()) + sum(seconds * (1 + _untimed_steps(seconds)) for seconds in turns)


def _untimed_steps(seconds: float) -> int:
    return 0 if seconds > 1.0 else max(1, min(20, ceil(0.005 / seconds)))


@pytest.mark.usefixtures("without_compiler", "lent_workers")
def test_a_trial_costs_its_setup_its_samples_and_at_most_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ceilings are measured before the clock runs, and no verdict here asks for them.
    monkeypatch.setattr(
        "redline.ladder.search.trials.ask_machine", lambda pool, device, **_: ask_machine(pool, device, measure=False)
    )
    moments: dict[str, float] = {}

    def listen(text: str, row: Measurement | None) -> None:
        moments.setdefault(text, time.monotonic())

    rows = [
        row
        for row in climb(
            f"{PLANTED}:waits",
            out=tmp_path,
            device="cpu",
            rungs=TRIALS,
            sampling=1,
            timeout=60,
            ablation=False,
            progress=listen,
        ).measurements
        if row.role == "trial"
    ]
    assert [(row.rung, row.verdict) for row in rows] == list(zip(TRIALS, VERDICTS, strict=True))
    assert all(row.samples for row in rows)
    wall_s = moments["the final race"] - moments[f"trying {TRIALS[0]}"]
    model_s = sum(map(in_the_model_s, rows))
    assert 0 < model_s < wall_s
    overhead_s = (wall_s - model_s) / len(rows)
    assert overhead_s < ALLOWED_S, f"{overhead_s:.2f} s a trial beyond {model_s / len(rows):.2f} s in the model"
