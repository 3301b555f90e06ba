"""Floating-point operations per layer: torch's own counter counts, our tracker says for which layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from redline.ladder.measuring.flops import counting_flops
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import Tracker

_EVERYTHING = "Global"


@dataclass(frozen=True)
class Flops:
    """Of one step: products and convolutions (a multiply and an add are two), as the counter knows them."""

    total: float
    by_layer: Mapping[str, float]


class _Parents:
    """Stands in for the counter's own module tracker, which loses its way in backward passes."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @property
    def parents(self) -> set[str]:
        # A name of our own cannot collide with the counter's, because of the colon.
        return {_EVERYTHING, f"layer:{self._tracker.current.layer}"}

    def __enter__(self) -> "_Parents":
        self._tracker.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tracker.__exit__(*error)


def count_flops(subject: Subject) -> Flops:
    """Runs one step under the counter."""
    with counting_flops(_Parents(Tracker(subject))) as counter:
        subject.step()
    by_layer = {
        name.removeprefix("layer:"): float(sum(counts.values()))
        for name, counts in counter.get_flop_counts().items()
        if name != _EVERYTHING
    }
    return Flops(float(counter.get_total_flops()), by_layer)
