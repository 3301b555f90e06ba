"""What is left to choose from against transformers' own, the draw against the probabilities, and the noise."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from goldens import check_golden
from redline.errors import RedlineError
from redline.generation import sampling as sampling_module
from redline.generation.request import Finish, Request
from redline.generation.request import SamplingOptions as Sampling
from redline.generation.sampler import Sampler
from redline.generation.sampling import seed_key
from redline.generation.sequence import Sequence
from redline.generation.step_plan import PlannedRow
from redline.ops.sample import mixed, noise

CPU = torch.device("cpu")


class Drawer:
    """Rows that sample together, with the seeds `seed + row`."""

    def __init__(
        self,
        sampling: Sampling | list[Sampling],
        rows: int,
        vocabulary: int,
        prompts: Tensor | None = None,
        **given: object,
    ) -> None:
        self.sampler, self.generated, self.sequences = Sampler(rows, vocabulary, CPU), 0, []
        for row in range(rows):
            own = sampling[row] if isinstance(sampling, list) else replace(sampling, seed=(sampling.seed + row) % 2**63)
            prompt = [0] if prompts is None else prompts[row].tolist()
            request = Request(str(row), prompt, 1000, own, **given)
            self.sequences.append(Sequence(request, row, 1000, Finish.LENGTH))
            self.sampler.admit(row, own, [] if prompts is None else prompt, [])

    def entries(self) -> list[PlannedRow]:
        return [PlannedRow(one, row, 0, 1, 1, self.generated) for row, one in enumerate(self.sequences)]

    def next_tokens(self, logits: Tensor, masks: list[bytes | None] | None = None) -> Tensor:
        found = self.sampler.sample(logits, self.entries(), masks or [None] * len(self.sequences))
        self.generated += 1
        return found.tokens_N


def cut(sampling: Sampling, logits: Tensor, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits after penalty, temperature and cuts, before noise."""
    kept: list[Tensor] = []

    def catch(logits: Tensor, temperature: Tensor, *numbers: Tensor) -> Tensor:
        kept.append(logits / temperature[:, None])
        return original(logits, temperature, *numbers)

    original = sampling_module.sample
    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "sample", catch)
        Drawer(sampling, len(logits), logits.shape[1], prompt).next_tokens(logits)
    return kept[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, top_k=1000),
        Sampling(temperature=0.9, top_p=0.8),
        Sampling(temperature=0.9, top_p=1e-6),
        Sampling(temperature=1.5, min_p=0.2),
        Sampling(temperature=1.2, repetition_penalty=1.7),
        Sampling(temperature=1.2, repetition_penalty=0.6),
        Sampling(temperature=0.8, top_k=30, top_p=0.9, min_p=0.05, repetition_penalty=1.4),
    ],
    ids=str,
)
def test_filtered_logits_agree_with_transformers(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import logits_process as oracle

    logits, prompt = 3 * torch.randn(4, 73), torch.randint(73, (4, 9))
    expected = logits.clone()
    if sampling.repetition_penalty != 1:
        expected = oracle.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(prompt, expected)
    expected = expected / sampling.temperature
    if sampling.top_k:
        expected = oracle.TopKLogitsWarper(sampling.top_k)(prompt, expected)
    if sampling.top_p < 1:
        expected = oracle.TopPLogitsWarper(sampling.top_p)(prompt, expected)
    if sampling.min_p:
        expected = oracle.MinPLogitsWarper(sampling.min_p)(prompt, expected)
    assert torch.allclose(cut(sampling, logits, prompt, monkeypatch), expected)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(5, 40)
    sampler = Drawer(Sampling(top_k=3, top_p=0.1), 5, 40)
    assert torch.equal(sampler.next_tokens(logits), logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e-21, 1e-30, 1e-38, 1e-45, 1e-300])
def test_a_temperature_that_leaves_nothing_to_chance_is_zero(temperature: float) -> None:
    logits = 100 * torch.randn(5, 40)
    sampler = Drawer(Sampling(temperature, top_p=0.9), 5, 40)
    assert torch.equal(sampler.next_tokens(logits), logits.argmax(1))


def test_the_lowest_sampling_temperature_takes_the_most_likely_token() -> None:
    logits = 100 * torch.randn(5, 40)
    sampler = Drawer(Sampling(1e-20), 5, 40)
    assert torch.equal(sampler.next_tokens(logits), logits.argmax(1))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=0.7, top_p=0.5),
        Sampling(temperature=0.7, min_p=0.2),
        Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_has_no_token(sampling: Sampling) -> None:
    logits = torch.randn(5, 40)
    logits[0, 17] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:30] = float("-inf")
    sampler = Drawer(sampling, 5, 40)
    for _ in range(3):
        tokens = sampler.next_tokens(logits).tolist()
        assert tokens[:3] == [-1, -1, -1] and tokens[3] not in range(1, 30) and min(tokens[3:]) >= 0


def test_the_draw_follows_the_probabilities() -> None:
    rows, vocabulary = 400, 6
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
    sampler = Drawer(Sampling(temperature=0.8, seed=1), rows, vocabulary)
    draws = torch.cat([sampler.next_tokens(logits.expand(rows, -1)) for _ in range(50)])
    found = draws.bincount(minlength=vocabulary) / len(draws)
    # 20,000 draws: a standard deviation is 0.0035 at the most.
    assert (found - (logits / 0.8).softmax(0)).abs().max() < 0.015


def test_rows_positions_and_seeds_draw_apart_and_a_seed_draws_the_same() -> None:
    def draws(sampling: Sampling, rows: int = 3) -> Tensor:
        sampler = Drawer(sampling, rows, 1000)
        return torch.stack([sampler.next_tokens(torch.zeros(rows, 1000)) for _ in range(20)])

    one = draws(Sampling(temperature=1.0, seed=7))
    assert torch.equal(one, draws(Sampling(temperature=1.0, seed=7)))
    assert torch.equal(one[:, 1:2], draws(Sampling(temperature=1.0, seed=8), rows=1))
    assert len(one.flatten().unique()) > 50
    for seed in (8, 7 + 2**32, 2**63 - 1):
        assert not torch.equal(one, draws(Sampling(temperature=1.0, seed=seed)))


def test_a_token_seen_in_the_prompt_or_drawn_before_is_penalized() -> None:
    sampler = Drawer(Sampling(repetition_penalty=4.0), 2, 10, torch.tensor([[7, 7, 3], [5, 5, 5]]))
    logits = torch.zeros(2, 10).index_fill(1, torch.tensor([7]), 2.0).index_fill(1, torch.tensor([2]), 1.0)
    assert sampler.next_tokens(logits).tolist() == [2, 7]
    assert sampler.next_tokens(logits).tolist() == [7, 2]
    # Another text in the same row has seen nothing.
    sampler.sampler.admit(0, Sampling(repetition_penalty=4.0), [], [])
    assert sampler.next_tokens(logits).tolist() == [7, 7]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    for options in (Sampling(frequency_penalty=0.4), Sampling(presence_penalty=1.1)):
        sampler = Drawer(options, 2, 10, torch.tensor([[7, 7], [2, 2]]))
        logits = torch.zeros(2, 10).index_fill(1, torch.tensor([7]), 2.0).index_fill(1, torch.tensor([2]), 1.0)
        found = torch.stack([sampler.next_tokens(logits) for _ in range(5)], 1).tolist()
        # 2.0, 1.6, 1.2, then 0.8 < 1.0; or 2.0, then 0.9 < 1.0, then 0.9 > -0.1.
        assert found == [[7, 7, 7, 2, 7] if options.frequency_penalty else [7, 2, 7, 7, 7]] * 2


def test_biases_and_stop_tokens_before_min_tokens() -> None:
    sampler = Drawer(Sampling(logit_bias={3: 5.0, 99: 1.0}), 2, 10, stop_tokens=frozenset({3, 4}), min_tokens=2)
    logits = torch.zeros(2, 10).index_fill(1, torch.tensor([7]), 2.0)
    assert [sampler.next_tokens(logits).tolist() for _ in range(3)] == [[7, 7], [7, 7], [3, 3]]


def test_a_mask_leaves_only_its_tokens() -> None:
    sampler = Drawer([Sampling(), Sampling(temperature=5.0), Sampling(temperature=5.0)], 3, 40)
    mask = (1 << 33 | 1 << 5).to_bytes(8, "little")
    for _ in range(20):
        tokens = sampler.next_tokens(torch.randn(3, 40), [mask, mask, None]).tolist()
        assert tokens[0] in (5, 33) and tokens[1] in (5, 33)
    assert sampler.next_tokens(torch.randn(3, 40), [bytes(8), None, None]).tolist()[0] == -1


def test_rows_with_different_settings_draw_what_they_draw_alone() -> None:
    settings = [
        Sampling(),
        Sampling(temperature=0.7, seed=3),
        Sampling(temperature=1.3, top_k=5, seed=4),
        Sampling(temperature=0.9, top_p=0.6, seed=5),
        Sampling(temperature=1.5, min_p=0.2, seed=6),
        Sampling(temperature=1.2, top_k=30, top_p=0.9, repetition_penalty=1.7, frequency_penalty=0.5, seed=7),
        Sampling(presence_penalty=1.0, logit_bias={4: 1.0}),
    ]
    together, logits = Drawer(settings, len(settings), 73), 3 * torch.randn(9, len(settings), 73)
    found = torch.stack([together.next_tokens(step) for step in logits])
    for row, options in enumerate(settings):
        alone = Drawer([options], 1, 73)
        assert [alone.next_tokens(step[row, None]).item() for step in logits] == found[:, row].tolist()


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(3, 40)
    sampler = Drawer(Sampling(temperature=2.0, top_k=3, logit_bias={1: 9.0}), 3, 40, logprobs=4)
    found = sampler.sampler.sample(logits, sampler.entries(), [None] * 3)
    expected = logits.log_softmax(-1)
    assert found.asked == [0, 1, 2] and found.chosen_M is not None and found.top_MK is not None
    torch.testing.assert_close(found.chosen_M, expected.gather(1, found.tokens_N[:, None])[:, 0])
    torch.testing.assert_close(found.top_MK, expected.topk(4).values)


def test_noise_is_finite_and_even() -> None:
    found = noise(torch.tensor([seed_key(2)]), torch.tensor([0]), 200_000)
    assert torch.isfinite(found).all() and abs(found.mean().item() - 0.5772) < 0.01
    assert len(mixed(torch.arange(100_000)).unique()) == 100_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"min_p": 2.0}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"seed": 2**63}, "from 0 to 2\\^63 − 1"),
        ({"seed": -1}, "not -1"),
    ],
)
def test_impossible_settings_raise(options: dict[str, float], words: str) -> None:
    with pytest.raises(RedlineError, match=words):
        Sampling(**options)


def test_settings_at_their_limits_are_valid() -> None:
    assert Sampling(top_p=1.0, min_p=1.0, seed=0) and Sampling(min_p=0.0, seed=2**63 - 1)
    for options in (
        {"temperature": float("inf")},
        {"repetition_penalty": float("inf")},
        {"min_p": -0.1},
        {"top_k": -1},
    ):
        with pytest.raises(RedlineError):
            Sampling(**options)


def test_the_noise_is_the_same_on_every_machine() -> None:
    """MurmurHash3 of 0, 1 and all ones, and what a seed draws of even probabilities."""
    assert mixed(torch.tensor([0, 1, 2**32 - 1])).tolist() == [0, 0x514E28B7, 0x81F16F39]
    sampler = Drawer(Sampling(1.0, seed=2**40 + 5), 3, 1000)
    drawn = [sampler.next_tokens(torch.zeros(3, 1000)).tolist() for _ in range(4)]
    check_golden("drawn_tokens.txt", "\n".join(map(str, drawn)) + "\n")
