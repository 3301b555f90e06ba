"""Prompts of several threads run as batches."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.generation.request import Output, Request
from redline.serving import BatchProcessor
from serving.fake_engine import REPLY, FakeEngine


class Watched(FakeEngine):
    """Remembers how many requests each step had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), 0.001)
        self.sizes: list[int] = []
        self.closed = False

    def step(self) -> list[Output]:
        self.sizes.append(len(self._requests))
        return super().step()

    def submit(self, request: Request) -> None:
        if len(request.prompt) > 100:
            raise RedlineError("the prompt is too long.")
        super().submit(request)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(folder: Path) -> Iterator[Watched]:
    made = Watched(folder)
    yield made
    assert made.closed


def test_texts_come_back_in_their_order(folder: Path, engine: Watched) -> None:
    with BatchProcessor(folder, max_batch_size=4, engine=engine) as batches, ThreadPoolExecutor(3) as pool:
        prompts = [f"[[say {number}]]" for number in range(12)]
        assert batches.process(prompts) == [str(number) for number in range(12)]
        texts = list(pool.map(lambda prompt: batches.submit(prompt).result(), prompts))
        assert texts == [str(number) for number in range(12)] and texts[0].reason == "stop"
    assert max(engine.sizes) == 4


def test_stop_strings_and_limits(folder: Path, engine: Watched) -> None:
    with BatchProcessor(folder, engine=engine) as batches:
        assert batches.submit("x", stop=["sea"]).result() == REPLY.partition("sea")[0]
        short = batches.submit("x", max_tokens=3, temperature=0.5, seed=1).result()
        assert (short, short.reason, len(short.tokens)) == (REPLY[:3], "length", 3)
        with pytest.raises(RedlineError, match="too long"):
            batches.submit("x" * 200).result()
        with pytest.raises(RedlineError, match="temperature must be"):
            batches.submit("x", temperature=-1)
        assert batches.process(["[[say on]]"]) == ["on"]


def test_without_dynamic_batching_a_batch_waits_until_it_is_full(folder: Path, engine: Watched) -> None:
    options = {"max_batch_size": 3, "timeout_ms": 400.0, "dynamic_batching": False}
    with BatchProcessor(folder, engine=engine, **options) as batches:
        assert batches.process(["[[say ab]]"] * 4) == ["ab"] * 4
    # Three start together, and the last one alone, after its time.
    assert engine.sizes == [3, 3, 3, 1, 1, 1]


def test_a_failing_engine_ends_all_texts(folder: Path, engine: Watched) -> None:
    def fail() -> list[Output]:
        raise RuntimeError("out of memory")

    engine.step = fail  # pyrefly: ignore
    with BatchProcessor(folder, engine=engine) as batches:
        with pytest.raises(RuntimeError, match="out of memory"):
            batches.submit("x").result()
        with pytest.raises(RedlineError, match="closed"):
            batches.submit("x")


def test_invalid_sizes(folder: Path) -> None:
    with pytest.raises(RedlineError, match="max_batch_size must be at least 1"):
        BatchProcessor(folder, max_batch_size=0)
    with pytest.raises(RedlineError, match="timeout_ms must not be negative"):
        BatchProcessor(folder, timeout_ms=-1)
