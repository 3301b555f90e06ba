"""What the figures say: each finding has a value, a limit and a sentence, and a model passes when all of them hold.

Drift is how far a figure's mean over the last tenth of the frames is from its mean over the first tenth. After a cut,
the first tenth of the new scene counts as the beginning, once it has had time to settle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redline.drift.watch import Watched

# Frames after the first, and after a cut, that may differ from what follows.
SETTLING = 8
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


def judge(watched: Watched) -> list[Finding]:
    """In the order in which a person would ask."""
    found = [_follows(watched), _changes(watched), _responds(watched)]
    first, last = _windows(watched)
    colour = max(abs(_drift(watched, name, first, last)) for name in ("red", "green", "blue"))
    found.append(_finding(watched, "colour drift", colour, COLOUR, f"its colours change by {100 * colour:.1f}%"))
    for name, limit, text in (
        ("contrast", CONTRAST, "its contrast changes by a factor of {:.2f}"),
        ("detail", DETAIL, "its detail changes by a factor of {:.2f}"),
    ):
        value = _drift(watched, name, first, last)
        found.append(_finding(watched, f"{name} drift", abs(value), limit, text.format(math.exp(value))))
    distance = _drift(watched, "distance", first, last)
    found.append(_finding(watched, "structure drift", distance, DISTANCE, "its distance to the input grows by {:.3f}"))
    if any(math.isfinite(value) for value in watched.series("flicker")):
        found += _flickers(watched, first, last)
    if any(math.isfinite(value) for value in watched.series("gain_db")):
        gain, lost = _mean(watched, "gain_db", range(SETTLING, len(watched.rows))), _gain_lost(watched, first, last)
        found.append(Finding(watched.case, "gain", gain, 0.0, gain > 0, f"it is {gain:+.2f} dB above its input"))
        found.append(_finding(watched, "gain drift", lost, GAIN_DB, "its gain over the input falls by {:.2f} dB"))
    if watched.cut is not None:
        found.append(_settles(watched))
    return found


def _finding(watched: Watched, name: str, value: float, limit: float, text: str) -> Finding:
    # A value that is not a number holds nothing.
    return Finding(watched.case, name, value, limit, value <= limit, text.format(value))


def _follows(watched: Watched) -> Finding:
    farthest = _mean(watched, "distance", range(len(watched.rows)))
    return _finding(watched, "follows its input", farthest, FARTHEST, "its structure is {:.2f} from the input's")


def _changes(watched: Watched) -> Finding:
    change = _mean(watched, "change", range(len(watched.rows)))
    said = f"it changes the input by {255 * change:.2f} levels of 255"
    return Finding(watched.case, "does something", change, LEAST_CHANGE, change >= LEAST_CHANGE, said)


def _responds(watched: Watched) -> Finding:
    responses = [value for value in watched.series("response") if not math.isnan(value)]
    least = min(responses, default=math.nan)
    said = f"of a change of the input at least {100 * least:.0f}% is left in the output"
    return Finding(watched.case, "reacts to its input", least, LEAST_RESPONSE, least >= LEAST_RESPONSE, said)


def _flickers(watched: Watched, first: range, last: range) -> list[Finding]:
    whole = range(SETTLING, len(watched.rows))
    ours, theirs = (_mean(watched, name, whole) for name in ("flicker", "input_flicker"))
    growth = _drift(watched, "flicker", first, last)
    return [
        _finding(watched, "steadier than its input", ours, theirs, f"warp error {ours:.4f}, the input's {theirs:.4f}"),
        _finding(watched, "flicker drift", growth, FLICKER, "its warp error grows by {:.4f}"),
    ]


def _settles(watched: Watched) -> Finding:
    """Nothing of the old scene is left some frames after the cut: the distance is what it will be."""
    assert watched.cut is not None
    after = _mean(watched, "distance", range(watched.cut + SETTLING, watched.cut + 2 * SETTLING))
    later = _mean(watched, "distance", range(watched.cut + 2 * SETTLING, len(watched.rows)))
    text = f"{SETTLING} frames after the cut it is {{:.3f}} farther from the input than later"
    return _finding(watched, "gets over a cut", after - later, DISTANCE, text)


def _gain_lost(watched: Watched, first: range, last: range) -> float:
    return -_drift(watched, "gain_db", first, last)


def _windows(watched: Watched) -> tuple[range, range]:
    begin = SETTLING if watched.cut is None else watched.cut + SETTLING
    begin = min(begin, len(watched.rows) - 2)
    size = max(1, (len(watched.rows) - begin) // 10)
    return range(begin, begin + size), range(len(watched.rows) - size, len(watched.rows))


def _drift(watched: Watched, name: str, first: range, last: range) -> float:
    return _mean(watched, name, last) - _mean(watched, name, first)


def _mean(watched: Watched, name: str, frames: Sequence[int]) -> float:
    """Over the frames where it is known to exist; an infinite or broken figure makes the mean so."""
    series = watched.series(name)
    missing = {"flicker", "input_flicker", "response"}
    values = [series[frame] for frame in frames if not (name in missing and math.isnan(series[frame]))]
    return sum(values) / len(values) if values else math.nan
