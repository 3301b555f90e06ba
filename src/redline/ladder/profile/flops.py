"""FLOPs per layer: the counter of torch with the layers of our tracker."""

from collections.abc import Mapping
from dataclasses import dataclass

from redline.ladder.measuring.flops import counting_flops
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import Tracker

_EVERYTHING = "Global"


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matrix products and convolutions of one step; a multiply-add counts as two."""

    total: float
    by_layer: Mapping[str, float]


class _Parents:
    """Replaces the module tracker of the counter, which is wrong in backward passes."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @property
    def parents(self) -> set[str]:
        # The prefix keeps names of layers apart from `Global`, which the counter uses for the total.
        return {_EVERYTHING, f"layer:{self._tracker.current.layer}"}

    def __enter__(self) -> "_Parents":
        self._tracker.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tracker.__exit__(*error)


def count_flops(subject: Subject) -> Flops:
    """Counts the FLOPs of one step."""
    with counting_flops(_Parents(Tracker(subject))) as counter:
        subject.step()
    by_layer = {
        name.removeprefix("layer:"): float(sum(counts.values()))
        for name, counts in counter.get_flop_counts().items()
        if name != _EVERYTHING
    }
    return Flops(float(counter.get_total_flops()), by_layer)
