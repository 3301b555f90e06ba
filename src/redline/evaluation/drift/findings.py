"""Judges a run. A finding is the result of one check: value, limit and sentence. A model passes if all findings hold.

Drift is the mean of a metric over the last tenth of the frames, minus its mean over the same frames for models that
started only a few frames earlier. The frames must be the same, because metrics depend on the content. The change since
the run's first tenth (if there is a cut, the first tenth of the new scene) is reported as well. Colours are also
compared with those of a model without a previous frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redline.evaluation.drift.case_run import SETTLING, CaseRun, Row

# The largest drifts that pass. The drift of colour, contrast and detail is the logarithm of a ratio.
COLOUR, CONTRAST, DETAIL = 0.05, 0.1, 0.25
DISTANCE, FLICKER, GAIN_DB = 0.05, 0.01, 0.5
# A model fails if the mean distance of its output to the input is above FARTHEST, if the mean change that it makes to
# the input is below LEAST_CHANGE, or if less than LEAST_RESPONSE of a change of the input appears in the output.
FARTHEST, LEAST_CHANGE, LEAST_RESPONSE = 0.75, 0.5 / 255, 0.2


@dataclass(frozen=True)
class Finding:
    case: str
    name: str
    value: float
    limit: float
    holds: bool
    sentence: str
    # For drift: the change from the first tenth of the frames to the last tenth, which includes changes of the content.
    since_first: float | None = None


def judge(run: CaseRun) -> list[Finding]:
    """Returns all findings of a run."""
    found = [_follows(run), _changes(run), _responds(run)]
    colour = max((_drift(run, name) for name in ("red", "green", "blue")), key=lambda drift: _size(drift[0]))
    text = f"its colours change by {100 * abs(colour[0]):.1f}%"
    found.append(_finding(run, "colour drift", abs(colour[0]), COLOUR, text, colour[1]))
    text = "feeding back its previous output changes its colours by {:.1%}"
    found.append(_finding(run, "colour feedback", _own_colour(run), COLOUR, text))
    for name, limit, text in (
        ("contrast", CONTRAST, "its contrast changes by a factor of {:.2f}"),
        ("detail", DETAIL, "its detail changes by a factor of {:.2f}"),
    ):
        value, since = _drift(run, name)
        found.append(_finding(run, f"{name} drift", abs(value), limit, text.format(math.exp(value)), since))
    distance, since = _drift(run, "distance")
    text = "its distance to the input grows by {:z.3f}"
    found.append(_finding(run, "structure drift", distance, DISTANCE, text, since))
    if any(math.isfinite(value) for value in run.series("flicker")):
        found += _flickers(run)
    if any(math.isfinite(value) for value in run.series("gain_db")):
        gain = _mean(run.rows, "gain_db", range(SETTLING, len(run.rows)))
        change, since = _drift(run, "gain_db")
        text = "its gain over the input falls by {:z.2f} dB"
        found.append(Finding(run.case, "gain", gain, 0.0, gain > 0, f"its PSNR is {gain:+.2f} dB above its input's"))
        found.append(_finding(run, "gain drift", -change, GAIN_DB, text, -since))
    if run.cut is not None:
        found.append(_settles(run))
    return found


def _finding(
    run: CaseRun, name: str, value: float, limit: float, text: str, since_first: float | None = None
) -> Finding:
    # A finding with the value NaN does not hold, because every comparison with NaN is false.
    return Finding(run.case, name, value, limit, value <= limit, text.format(value), since_first)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def _follows(run: CaseRun) -> Finding:
    farthest = _mean(run.rows, "distance", range(len(run.rows)))
    return _finding(run, "follows its input", farthest, FARTHEST, "its structural distance to the input is {:.2f}")


def _changes(run: CaseRun) -> Finding:
    change = _mean(run.rows, "change", range(len(run.rows)))
    text = f"it changes the input by {255 * change:.2f} levels of 255"
    return Finding(run.case, "does something", change, LEAST_CHANGE, change >= LEAST_CHANGE, text)


def _responds(run: CaseRun) -> Finding:
    responses = [value for value in run.series("response") if not math.isnan(value)]
    least = min(responses, default=math.nan)
    text = f"at least {100 * least:.0f}% of a change of the input appears in the output"
    return Finding(run.case, "reacts to its input", least, LEAST_RESPONSE, least >= LEAST_RESPONSE, text)


def _flickers(run: CaseRun) -> list[Finding]:
    frames = range(SETTLING, len(run.rows))
    ours, theirs = (_mean(run.rows, name, frames) for name in ("flicker", "input_flicker"))
    growth, since = _drift(run, "flicker")
    text = f"its warp error is {ours:.4f}, the input's {theirs:.4f}"
    return [
        _finding(run, "steadier than its input", ours, theirs, text),
        _finding(run, "flicker drift", growth, FLICKER, "its warp error grows by {:z.4f}", since),
    ]


def _settles(run: CaseRun) -> Finding:
    """Compares the distance to the input shortly after the cut with the distance later."""
    assert run.cut is not None
    after = _mean(run.rows, "distance", range(run.cut + SETTLING, run.cut + 2 * SETTLING))
    later = _mean(run.rows, "distance", range(run.cut + 2 * SETTLING, len(run.rows)))
    text = f"{SETTLING} frames after the cut, its distance to the input is larger by {{:.3f}} than later"
    return _finding(run, "gets over a cut", after - later, DISTANCE, text)


def _drift(run: CaseRun, name: str) -> tuple[float, float]:
    """Returns two differences of the mean over the last frames: from the mean of the restarted models on these frames,
    and from the mean over the first frames.
    """
    end = _mean(run.rows, name, run.last)
    return end - _mean(run.restarted, name, range(len(run.restarted))), end - _mean(run.rows, name, run.first)


def _own_colour(run: CaseRun) -> float:
    """Returns the colour change due to feedback: the difference from a model without a previous frame.

    Restarted models cannot serve as the reference, because they show the same change if it builds up in a few frames.
    """
    differences = []
    for name in ("red", "green", "blue"):
        values = [run.rows[frame][name] - row[name] for frame, row in run.alone.items()]
        differences.append(sum(values) / len(values) if values else math.nan)
    return max(map(_size, differences))


def _mean(rows: Sequence[Row], name: str, frames: Sequence[int]) -> float:
    """Returns the mean over frames. Skips NaN in metrics that not every frame has; any other NaN makes the mean NaN."""
    optional = {"flicker", "input_flicker", "response"}
    values = [rows[frame][name] for frame in frames if not (name in optional and math.isnan(rows[frame][name]))]
    return sum(values) / len(values) if values else math.nan
