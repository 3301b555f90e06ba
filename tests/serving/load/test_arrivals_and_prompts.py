"""Arrival times and prompts depend on the seed alone, and have the distribution that was asked for."""

from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from redline.errors import RedlineError
from redline.serving.load.arrivals import Load, arrival_times
from redline.serving.load.prompts import RandomPrompts, Span


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (float("inf"), 0.0)])
def test_intervals_have_the_mean_and_the_variation(burstiness: float, variation: float) -> None:
    times = list(islice(arrival_times(Load(rate=20.0, burstiness=burstiness), seed=3), 20_001))
    intervals = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and fmean(intervals) == pytest.approx(0.05, rel=0.05)
    assert pstdev(intervals) / fmean(intervals) == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_a_seed_gives_its_arrivals_and_prompts_again() -> None:
    def times(seed: int) -> list[float]:
        return list(islice(arrival_times(Load(rate=5.0), seed), 50))

    assert times(1) == times(1) != times(2)

    def prompts(seed: int) -> list[object]:
        make = RandomPrompts("words", Span(2, 9), Span(3, 4), seed)
        return [make(number) for number in range(20)]

    assert prompts(1) == prompts(1) != prompts(2)


def test_lengths_are_in_their_range_and_prefixes_are_shared() -> None:
    make = RandomPrompts("tokens", Span(10, 20), Span(5, 6), prefix=30, prefix_share=0.75, vocabulary=1000)
    bodies = [make(number) for number in range(400)]
    shared = [body["prompt"] for body in bodies if len(body["prompt"]) > 20]
    assert len({tuple(prompt[:30]) for prompt in shared}) == 1
    assert 0.65 < len(shared) / len(bodies) < 0.85
    assert {len(prompt) for prompt in shared} == set(range(40, 51))
    assert {body["max_tokens"] for body in bodies} == {5, 6}
    assert all(256 <= token < 1000 for body in bodies for token in body["prompt"])
    assert len({tuple(body["prompt"][-10:]) for body in bodies}) == 400, "no two prompts are the same"


@pytest.mark.parametrize("text", ["", "a", "0", "5-4", "-3", "1-2-3", "1-99999999999"])
def test_unusable_spans_raise(text: str) -> None:
    with pytest.raises(RedlineError):
        Span.parse(text)


def test_unusable_settings_raise() -> None:
    span = Span(1, 2)
    for options in ({"kind": "pictures"}, {"prefix": -1}, {"prefix_share": 1.5}, {"vocabulary": 256}):
        with pytest.raises(RedlineError):
            RandomPrompts(**{"kind": "words", "input": span, "output": span, **options})
    with pytest.raises(RedlineError, match="either a rate or a concurrency"):
        Load(rate=1.0, concurrency=1)
