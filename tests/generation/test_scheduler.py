"""The scheduler as a state machine: whatever arrives, ends and is aborted, nobody reads another text or waits for ever.

Needs no torch: thousands of steps run in a second.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from redline.errors import RedlineError
from redline.generation.request import Request

from .fake_device import ALPHABET, FakeDevice, next_token

PROMPTS = st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=9)


class Traffic(RuleBasedStateMachine):
    drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice(drafts=self.drafts)

    @rule(
        prompt=PROMPTS,
        most=st.integers(1, 6),
        salt=st.sampled_from(("", "b")),
        stops=st.booleans(),
        waits=st.booleans(),
    )
    def arrive(self, prompt: list[int], most: int, salt: str, stops: bool, waits: bool) -> None:
        name = str(len(self.device.requests))
        stop_tokens = frozenset({0}) if stops else frozenset()
        self.device.add(Request(name, prompt, most, stop_tokens=stop_tokens, salt=salt), waits)

    @rule()
    def step(self) -> None:
        self.device.launch()

    @precondition(lambda self: self.device.in_flight)
    @rule()
    def read(self) -> None:
        self.device.read()

    @precondition(lambda self: self.device.scheduler._sequences)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: random.Random) -> None:
        self.device.abort(choice.choice(sorted(self.device.scheduler._sequences)))

    @invariant()
    def holds(self) -> None:
        self.device.check()

    def teardown(self) -> None:
        self.device.run(behind=1)
        self.device.check_texts()
        assert self.device.scheduler.blocks.used == 0


class DraftedTraffic(Traffic):
    drafts = True


QUICK = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestTraffic = Traffic.TestCase
TestTraffic.settings = QUICK
TestDraftedTraffic = DraftedTraffic.TestCase
TestDraftedTraffic.settings = QUICK


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(ALPHABET), k=length)


def requests(count: int, seed: int = 0) -> list[Request]:
    choice = random.Random(seed)
    return [Request(str(i), prompt_of(choice.randint(1, 9), i), choice.randint(1, 7)) for i in range(count)]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_full_pool_preempts_and_everybody_ends(behind: int, drafts: bool) -> None:
    device = FakeDevice(blocks=8, drafts=drafts)
    for request in requests(60):
        device.add(request)
    device.run(behind)
    device.check_texts()
    stats = device.scheduler.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert (stats.accepted_tokens > 0) == drafts


def test_ten_thousand_aborts_leak_nothing() -> None:
    device, choice = FakeDevice(blocks=16), random.Random(1)
    for number in range(10_000):
        device.add(Request(str(number), prompt_of(choice.randint(1, 9), number % 50), 5))
        for _ in range(choice.randrange(3)):
            device.launch()
        if device.in_flight and choice.random() < 0.7:
            device.read()
        device.abort(str(number)) if str(number) in device.scheduler else None
    device.run()
    blocks = device.scheduler.blocks
    assert blocks.used == 0 and blocks.available == 16 and len(device.scheduler._rows) == 4


def test_prefixes_are_shared_by_siblings_and_later_requests_of_the_same_salt() -> None:
    device = FakeDevice(blocks=64, size=4, token_budget=64, chunk=64, prompt_cost=64)
    prompt = prompt_of(18)
    for name, salt in (("0", ""), ("1", ""), ("2", "other")):
        device.add(Request(name, prompt, 4, salt=salt))
    device.launch()
    first, second, third = device.scheduler.running
    assert [one.cached for one in (first, second, third)] == [0, 16, 0]
    assert first.blocks[:4] == second.blocks[:4] and first.blocks[4] != second.blocks[4]
    device.run()
    # A conversation goes on: its next prompt holds the answer.
    device.add(Request("3", [*prompt, *device.texts["0"], 1, 2], 4))
    device.launch()
    assert device.scheduler["3"].cached == 20
    device.run()
    device.check_texts()


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    device = FakeDevice(blocks=16, size=4)
    device.add(Request("0", prompt_of(8), 3))
    device.run()
    device.add(Request("1", prompt_of(8), 3))
    device.run()
    device.check_texts()
    assert device.scheduler.stats().cached_tokens == 4


def test_tails_are_evicted_before_heads() -> None:
    device = FakeDevice(blocks=6, size=2)
    device.add(Request("0", prompt_of(8), 1))
    device.run()
    device.add(Request("1", [0] * 7, 1))  # takes 4 blocks, of which 2 are free
    device.run()
    device.add(Request("2", prompt_of(8), 1))
    device.launch()
    assert device.scheduler["2"].cached == 4
    device.run()


def test_decoding_goes_on_beside_a_long_prompt_and_the_prompt_goes_on_too() -> None:
    device = FakeDevice(blocks=2000, size=4, rows=3, token_budget=4096, chunk=4096, prompt_cost=256)
    device.add(Request("chat", prompt_of(5), 200))
    device.launch(), device.read()
    device.add(Request("long", prompt_of(1500), 1))
    device.add(Request("later", prompt_of(3), 1))
    steps = 0
    while "long" not in device.ended:
        generated = len(device.texts["chat"])
        device.launch(), device.read()
        assert len(device.texts["chat"]) == generated + 1
        steps += 1
    assert 1500 / 256 <= steps <= 1500 / 128 + 2
    device.run()
    device.check_texts()


def test_first_come_first_served() -> None:
    device = FakeDevice(rows=1, blocks=32)
    for request in requests(10):
        device.add(request)
    device.run()
    assert list(device.ended) == [str(number) for number in range(10)]


def test_requests_that_can_never_run_are_refused() -> None:
    device = FakeDevice(blocks=4, size=2)
    with pytest.raises(RedlineError, match="may grow to 9 tokens, and the key-value cache has room for 8: ask for"):
        device.add(Request("0", prompt_of(5), 4))
    device.add(Request("0", prompt_of(5), 3))
    with pytest.raises(RedlineError, match="already a request with the id '0'"):
        device.add(Request("0", prompt_of(5), 3))
    with pytest.raises(RedlineError, match="token_budget must be at least max_rows .4., not 3"):
        FakeDevice(token_budget=3)


def test_a_broken_text_leaves_no_names_behind() -> None:
    from redline.generation.request import Finish

    device = FakeDevice(blocks=16, size=2)
    device.add(Request("0", prompt_of(8), 5))
    device.launch()
    device.scheduler.abort("0", Finish.ERROR)
    device.add(Request("1", prompt_of(8), 5))
    device.launch()
    assert device.scheduler["1"].cached == 0
    device.check()


def test_the_next_token_is_a_function_of_the_whole_text() -> None:
    assert {next_token((1, *prompt_of(5, seed))) for seed in range(9)} == set(range(ALPHABET))
