"""What the load generator measures, against a server whose delays are known exactly."""

from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import pytest

from redline.errors import RedlineError
from redline.serving.load.arrivals import Load, arrival_times
from redline.serving.load.client import Target
from redline.serving.load.outcome import Outcome, Status
from redline.serving.load.processes import run_level_in_processes
from redline.serving.load.prompts import RandomPrompts, Span
from redline.serving.load.run import Extent, Part, run_level
from redline.serving.load.summary import Level, Limits, summarize
from serving import virtual_time
from serving.fake_server import Answer, FakeServer

PROMPTS = RandomPrompts("words", Span(3, 5), Span(8, 8))
EVEN = Load(rate=10.0, burstiness=float("inf"))


def measure(
    server: FakeServer, load: Load, extent: Extent, limits: str = "", **target: Any
) -> tuple[list[Outcome], Level]:
    async def main() -> list[Outcome]:
        async with server.running():
            return await run_level(Target(server.url, "tiny", **target), PROMPTS, load, extent)

    outcomes = virtual_time.run(main())
    return outcomes, summarize(load, outcomes, Limits.parse(limits))


def test_latencies_and_rates_are_those_of_the_server() -> None:
    answer = Answer(("a",) * 5, first_s=0.3, gap_s=0.02, prompt_tokens=11, cached_tokens=4, tokens_per_chunk=2)
    outcomes, level = measure(FakeServer(lambda _: answer), EVEN, Extent(requests=3))
    for outcome in outcomes:
        assert outcome.status is Status.DONE and outcome.finish == "stop" and outcome.chunks == 5
        assert outcome.ttft_s == pytest.approx(0.3) and outcome.gaps_s == pytest.approx([0.02] * 4)
        # 10 tokens in 5 chunks: 9 tokens after the first, in 4 gaps.
        assert outcome.tpot_s == pytest.approx(0.08 / 9) and outcome.e2e_s == pytest.approx(0.38)
    assert [outcome.due_s - outcomes[0].due_s for outcome in outcomes] == pytest.approx([0, 0.1, 0.2])
    assert level.ttft and level.itl and level.e2e and level.late
    assert (level.ttft.p50_s, level.ttft.p99_s, level.e2e.most_s) == pytest.approx((0.3, 0.3, 0.38))
    assert level.itl.count == 12 and level.itl.p99_s == pytest.approx(0.02)
    # From the first request at 0 to the last answer, which began at 0.2.
    assert level.duration_s == pytest.approx(0.58)
    assert level.output_tokens_per_s == pytest.approx(30 / 0.58)
    assert level.total_tokens_per_s == pytest.approx(63 / 0.58) and level.requests_per_s == pytest.approx(3 / 0.58)
    assert level.cached_share == pytest.approx(4 / 11) and level.tokens_per_chunk == pytest.approx(2)
    assert level.most_running == 3 and level.late.most_s == pytest.approx(0, abs=1e-3)


def test_percentiles_are_those_of_the_answers() -> None:
    firsts = iter(range(1, 102))
    server = FakeServer(lambda _: Answer(("a",), first_s=next(firsts) / 100))
    _, level = measure(server, Load(concurrency=1), Extent(requests=101))
    assert level.ttft and level.itl is None and level.tpot is None
    assert (level.ttft.p50_s, level.ttft.p95_s, level.ttft.p99_s) == pytest.approx((0.51, 0.96, 1.0))
    assert level.ttft.mean_s == pytest.approx(0.51) and level.most_running == 1


def test_clients_wait_for_their_answers() -> None:
    answer = Answer(("a", "b"), first_s=0.05, gap_s=0.05)
    outcomes, level = measure(FakeServer(lambda _: answer), Load(concurrency=4), Extent(requests=10))
    # Four at a time: rounds of 4, 4 and 2 answers of 0.1 s.
    assert level.duration_s == pytest.approx(0.3) and level.most_running == 4
    assert sorted(outcome.number for outcome in outcomes) == list(range(10))
    _, level = measure(FakeServer(lambda _: answer), Load(concurrency=2), Extent(duration_s=0.45))
    assert level.requests == 10 and level.duration_s == pytest.approx(0.5)


def test_no_request_is_sent_after_the_duration() -> None:
    _, level = measure(FakeServer(lambda _: Answer(first_s=1.0)), EVEN, Extent(duration_s=0.5))
    assert level.requests == level.done == 5 and level.duration_s == pytest.approx(1.4)


def test_rejected_failed_and_good_requests_are_counted_apart() -> None:
    def answer(body: dict[str, Any]) -> Answer:
        number = len(server.seen) - 1
        return (
            Answer(("a", "b"), first_s=0.1, gap_s=0.01),
            Answer(("a", "b"), first_s=0.1, gap_s=0.2),
            Answer(("a", "b"), first_s=0.6, gap_s=0.01),
            Answer(status=429, message="the queue is full", headers={"Retry-After": "3"}),
            Answer(status=503, message="draining"),
            Answer(status=500, message="out of order"),
            Answer(("a",), cut=True),
            Answer(("a",), error="the engine ended"),
        )[number]

    server = FakeServer(answer)
    outcomes, level = measure(server, EVEN, Extent(requests=8), limits="ttft=500ms, gap=100ms")
    assert [outcome.status for outcome in outcomes] == [Status.DONE] * 3 + [Status.REJECTED] * 2 + [Status.FAILED] * 3
    assert (level.done, level.rejected, level.failed, level.good) == (3, 2, 3, 1)
    assert level.ttft and level.ttft.count == 3, "latencies of failed requests are left out"
    assert level.goodput_per_s == pytest.approx(1 / level.duration_s)
    assert outcomes[3].error == "429 the queue is full" and outcomes[5].error == "500 out of order"
    assert outcomes[6].error == "the connection was lost in the middle of the answer"
    assert level.errors["the engine ended"] == 1 and len(level.errors) == 5
    assert level.output_tokens == 6


def test_an_answer_that_does_not_come_is_a_failure() -> None:
    outcomes, level = measure(
        FakeServer(lambda _: Answer(first_s=100.0)), Load(concurrency=1), Extent(requests=1), timeout_s=2.0
    )
    assert level.failed == 1 and outcomes[0].error == "no answer within 2 s"
    assert outcomes[0].e2e_s == pytest.approx(2.0)


def test_clients_that_leave_close_the_connection() -> None:
    answer = Answer(("a",) * 64, gap_s=0.01)
    server = FakeServer(lambda _: answer)
    outcomes, level = measure(server, Load(concurrency=2), Extent(requests=20, abandon_share=0.5))
    left = [outcome for outcome in outcomes if outcome.status is Status.ABANDONED]
    assert level.abandoned == len(left) == server.disconnects and 4 <= len(left) <= 16
    assert level.done == 20 - len(left) and level.ttft and level.ttft.count == level.done
    assert all(outcome.chunks <= 32 for outcome in left)


def test_usage_may_be_missing() -> None:
    _, level = measure(FakeServer(lambda _: Answer(usage=False)), Load(concurrency=1), Extent(requests=2))
    assert (level.done, level.counted, level.output_tokens, level.output_tokens_per_s) == (2, 0, 0, 0)


def test_requests_have_the_prompt_the_limits_and_the_key() -> None:
    server = FakeServer(key="the key")
    measure(server, Load(concurrency=1), Extent(requests=2), key="the key", extra={"ignore_eos": True})
    assert [body["prompt"] for body in server.seen] == [PROMPTS(0)["prompt"], PROMPTS(1)["prompt"]]
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in server.seen)
    assert all(body["max_tokens"] == 8 and body["ignore_eos"] and body["model"] == "tiny" for body in server.seen)
    server = FakeServer()
    outcomes, _ = measure(server, Load(concurrency=1), Extent(requests=1), endpoint="chat")
    assert server.seen[0]["messages"] == [{"role": "user", "content": PROMPTS(0)["prompt"]}]
    assert outcomes[0].chunks == 2, "the chunk with the role is not text"
    outcomes, level = measure(FakeServer(key="the key"), Load(concurrency=1), Extent(requests=1))
    assert level.failed == 1 and outcomes[0].error == "401 the API key is missing or wrong."


def test_a_client_that_is_late_makes_the_latency_worse() -> None:
    outcome = Outcome(number=0, status=Status.DONE, due_s=1.0, sent_s=1.5, first_s=2.0, last_s=2.0, ended_s=2.25)
    assert (outcome.ttft_s, outcome.e2e_s) == (1.0, 1.25)
    assert not Limits.parse("ttft=600ms").are_kept(outcome) and Limits.parse("ttft=1s").are_kept(outcome)
    assert not Limits.parse("e2e=1.2s").are_kept(outcome)
    assert not Limits.parse("ttft=1s").are_kept(msgspec.structs.replace(outcome, status=Status.ABANDONED))


@pytest.mark.parametrize("text", ["speed=1s", "ttft", "ttft=fast", "ttft=-1s"])
def test_unusable_limits_raise(text: str) -> None:
    with pytest.raises(RedlineError):
        Limits.parse(text)


def test_no_outcome_is_an_error() -> None:
    with pytest.raises(RedlineError, match="no request was sent"):
        summarize(replace(EVEN), [], Limits())


def test_processes_share_a_level() -> None:
    with FakeServer(lambda _: Answer(("a",) * 3, first_s=0.02, gap_s=0.01)).in_thread() as server:
        target = Target(server.url, "tiny")
        reports: list[int] = []
        outcomes = run_level_in_processes(
            2, target, PROMPTS, Load(rate=50.0), Extent(requests=9), 5, lambda now: reports.append(now.ended)
        )
        assert [outcome.number for outcome in outcomes] == list(range(5, 14)) and reports[-1] == 9
        level = summarize(Load(rate=50.0), outcomes, Limits())
        assert level.done == 9 and level.ttft and level.ttft.p50_s >= 0.02
        assert {body["prompt"] for body in server.seen} == {PROMPTS(number)["prompt"] for number in range(5, 14)}
        # The arrivals are those of one process, up to the time by which the processes begin apart.
        expected = list(islice(arrival_times(Load(rate=50.0), 0), 9))
        offsets = [outcome.due_s - outcomes[0].due_s for outcome in outcomes]
        assert offsets == pytest.approx(expected, abs=2.0) and offsets[::2] == pytest.approx(expected[::2])


@pytest.mark.parametrize(("clients", "processes", "requests"), [(1, 4, 10), (3, 2, 10), (5, 3, 4), (2, 3, 1)])
def test_parts_of_clients_send_each_request_once(clients: int, processes: int, requests: int) -> None:
    async def main() -> list[list[int]]:
        async with FakeServer().running() as server:
            target, load, extent = Target(server.url, "tiny"), Load(concurrency=clients), Extent(requests)
            parts = [Part(index, processes) for index in range(processes)]
            found = [await run_level(target, PROMPTS, load, extent, 7, part=part) for part in parts]
        return [[outcome.number for outcome in outcomes] for outcomes in found]

    found = virtual_time.run(main())
    assert sorted(number for numbers in found for number in numbers) == list(range(7, 7 + requests))
    shares = [len(range(index, clients, processes)) for index in range(processes)]
    # A process with twice as many clients has twice as many requests.
    assert all(
        abs(len(numbers) - requests * share / clients) < share + 1 for numbers, share in zip(found, shares, strict=True)
    )


@pytest.mark.slow
def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(RedlineError, match="a process of the load generator ended with 1"):
        run_level_in_processes(2, Target("http://127.0.0.1:1", "m"), no_prompts, EVEN, Extent(requests=1))


def no_prompts(number: int) -> dict[str, Any]:
    raise ValueError(number)
