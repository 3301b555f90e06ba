"""What the figures say: each finding has a value, a limit and a sentence, and a model passes when all of them hold.

Drift is how far a figure's mean over the last tenth of the frames is from that of a model which began a few frames
before each of them: what a restorer does depends on what is in the picture, and so both see the same. How far it is
from its own first tenth (after a cut, that of the new scene) is told beside it. Colours are held against those of a
model that saw nothing before as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redline.evaluation.drift.case_run import SETTLING, CaseRun, Row

# As logarithms: a twentieth, a tenth and a quarter.
COLOUR, CONTRAST, DETAIL = 0.05, 0.1, 0.25
DISTANCE, FLICKER, GAIN_DB = 0.05, 0.01, 0.5
# Beyond these the output has left the input, does nothing, or looks at nothing.
FARTHEST, LEAST_CHANGE, LEAST_RESPONSE = 0.75, 0.5 / 255, 0.2


@dataclass(frozen=True)
class Finding:
    case: str
    name: str
    value: float
    limit: float
    holds: bool
    sentence: str
    # Of drift: from the first tenth to the last, with whatever the pictures changed by.
    since_first: float | None = None


def judge(watched: CaseRun) -> list[Finding]:
    """In the order in which a person would ask."""
    found = [_follows(watched), _changes(watched), _responds(watched)]
    colour = max((_drift(watched, name) for name in ("red", "green", "blue")), key=lambda drift: _size(drift[0]))
    said = f"its colours change by {100 * abs(colour[0]):.1f}%"
    found.append(_finding(watched, "colour drift", abs(colour[0]), COLOUR, said, colour[1]))
    said = "by what it made before, its colours differ by {:.1%} from those of the frame alone"
    found.append(_finding(watched, "colour of its own making", _own_colour(watched), COLOUR, said))
    for name, limit, text in (
        ("contrast", CONTRAST, "its contrast changes by a factor of {:.2f}"),
        ("detail", DETAIL, "its detail changes by a factor of {:.2f}"),
    ):
        value, since = _drift(watched, name)
        found.append(_finding(watched, f"{name} drift", abs(value), limit, text.format(math.exp(value)), since))
    distance, since = _drift(watched, "distance")
    said = "its distance to the input grows by {:z.3f}"
    found.append(_finding(watched, "structure drift", distance, DISTANCE, said, since))
    if any(math.isfinite(value) for value in watched.series("flicker")):
        found += _flickers(watched)
    if any(math.isfinite(value) for value in watched.series("gain_db")):
        gain = _mean(watched.rows, "gain_db", range(SETTLING, len(watched.rows)))
        change, since = _drift(watched, "gain_db")
        said = "its gain over the input falls by {:z.2f} dB"
        found.append(Finding(watched.case, "gain", gain, 0.0, gain > 0, f"it is {gain:+.2f} dB above its input"))
        found.append(_finding(watched, "gain drift", -change, GAIN_DB, said, -since))
    if watched.cut is not None:
        found.append(_settles(watched))
    return found


def _finding(
    watched: CaseRun, name: str, value: float, limit: float, text: str, since_first: float | None = None
) -> Finding:
    # A value that is not a number holds nothing.
    return Finding(watched.case, name, value, limit, value <= limit, text.format(value), since_first)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def _follows(watched: CaseRun) -> Finding:
    farthest = _mean(watched.rows, "distance", range(len(watched.rows)))
    return _finding(watched, "follows its input", farthest, FARTHEST, "its structure is {:.2f} from the input's")


def _changes(watched: CaseRun) -> Finding:
    change = _mean(watched.rows, "change", range(len(watched.rows)))
    said = f"it changes the input by {255 * change:.2f} levels of 255"
    return Finding(watched.case, "does something", change, LEAST_CHANGE, change >= LEAST_CHANGE, said)


def _responds(watched: CaseRun) -> Finding:
    responses = [value for value in watched.series("response") if not math.isnan(value)]
    least = min(responses, default=math.nan)
    said = f"of a change of the input at least {100 * least:.0f}% is left in the output"
    return Finding(watched.case, "reacts to its input", least, LEAST_RESPONSE, least >= LEAST_RESPONSE, said)


def _flickers(watched: CaseRun) -> list[Finding]:
    whole = range(SETTLING, len(watched.rows))
    ours, theirs = (_mean(watched.rows, name, whole) for name in ("flicker", "input_flicker"))
    growth, since = _drift(watched, "flicker")
    return [
        _finding(watched, "steadier than its input", ours, theirs, f"warp error {ours:.4f}, the input's {theirs:.4f}"),
        _finding(watched, "flicker drift", growth, FLICKER, "its warp error grows by {:z.4f}", since),
    ]


def _settles(watched: CaseRun) -> Finding:
    """Nothing of the old scene is left some frames after the cut: the distance is what it will be."""
    assert watched.cut is not None
    after = _mean(watched.rows, "distance", range(watched.cut + SETTLING, watched.cut + 2 * SETTLING))
    later = _mean(watched.rows, "distance", range(watched.cut + 2 * SETTLING, len(watched.rows)))
    text = f"{SETTLING} frames after the cut it is {{:.3f}} farther from the input than later"
    return _finding(watched, "gets over a cut", after - later, DISTANCE, text)


def _drift(watched: CaseRun, name: str) -> tuple[float, float]:
    """Of the last frames: from what a model that began before them makes of them, and from its own first frames."""
    end = _mean(watched.rows, name, watched.last)
    return end - _mean(watched.anew, name, range(len(watched.anew))), end - _mean(watched.rows, name, watched.first)


def _own_colour(watched: CaseRun) -> float:
    """What feeds on itself and settles within a few frames is the same however long ago it began."""
    differences = []
    for name in ("red", "green", "blue"):
        values = [watched.rows[frame][name] - row[name] for frame, row in watched.alone.items()]
        differences.append(sum(values) / len(values) if values else math.nan)
    return max(map(_size, differences))


def _mean(rows: Sequence[Row], name: str, frames: Sequence[int]) -> float:
    """Over the frames where it is known to exist; an infinite or broken figure makes the mean so."""
    missing = {"flicker", "input_flicker", "response"}
    values = [rows[frame][name] for frame in frames if not (name in missing and math.isnan(rows[frame][name]))]
    return sum(values) / len(values) if values else math.nan
