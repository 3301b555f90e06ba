"""What is left to choose from against transformers' own, the draw against the probabilities, and the noise."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from goldens import check_golden
from redline.errors import RedlineError
from redline.generation.sampling import Sampler, Sampling, mixed

CPU = torch.device("cpu")


def cut(sampling: Sampling, logits: Tensor, prompt: Tensor) -> Tensor:
    """The logits after penalty, temperature and cuts, before noise."""
    sampler = Sampler(sampling, len(logits), logits.shape[1], CPU)
    sampler.notice(prompt, torch.full((len(prompt),), prompt.shape[1]))
    kept: list[Tensor] = []

    def silent() -> Tensor:
        return torch.zeros_like(logits)

    original = sampler._cut
    sampler._noise = silent

    def catch(*arguments: Tensor) -> Tensor:
        kept.append(original(*arguments))
        return kept[-1]

    sampler._cut = catch
    sampler.next_tokens(logits)
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
def test_filtered_logits_agree_with_transformers(sampling: Sampling) -> None:
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
    assert torch.allclose(cut(sampling, logits, prompt), expected)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(5, 40)
    sampler = Sampler(Sampling(top_k=3, top_p=0.1), 5, 40, CPU)
    assert torch.equal(sampler.next_tokens(logits), logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e-21, 1e-30, 1e-38, 1e-45, 1e-300])
def test_a_temperature_that_leaves_nothing_to_chance_is_zero(temperature: float) -> None:
    logits = 100 * torch.randn(5, 40)
    sampler = Sampler(Sampling(temperature, top_p=0.9), 5, 40, CPU)
    assert torch.equal(sampler.next_tokens(logits), logits.argmax(1))
    assert Sampling(temperature, top_p=0.9).form == Sampling(0.0).form


def test_the_lowest_sampling_temperature_takes_the_most_likely_token() -> None:
    logits = 100 * torch.randn(5, 40)
    sampler = Sampler(Sampling(1e-20), 5, 40, CPU)
    assert Sampling(1e-20).form != Sampling().form
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
    sampler = Sampler(sampling, 5, 40, CPU)
    for _ in range(3):
        tokens = sampler.next_tokens(logits).tolist()
        assert tokens[:3] == [-1, -1, -1] and tokens[3] not in range(1, 30) and min(tokens[3:]) >= 0


def test_the_draw_follows_the_probabilities() -> None:
    rows, vocabulary = 400, 6
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
    sampler = Sampler(Sampling(temperature=0.8, seed=1), rows, vocabulary, CPU)
    draws = torch.cat([sampler.next_tokens(logits.expand(rows, -1)) for _ in range(50)])
    found = draws.bincount(minlength=vocabulary) / len(draws)
    # 20,000 draws: a standard deviation is 0.0035 at the most.
    assert (found - (logits / 0.8).softmax(0)).abs().max() < 0.015


def test_rows_positions_and_seeds_draw_apart_and_a_seed_draws_the_same() -> None:
    def draws(sampling: Sampling, rows: int = 3) -> Tensor:
        sampler = Sampler(sampling, rows, 1000, CPU)
        return torch.stack([sampler.next_tokens(torch.zeros(rows, 1000)) for _ in range(20)])

    one = draws(Sampling(temperature=1.0, seed=7))
    assert torch.equal(one, draws(Sampling(temperature=1.0, seed=7)))
    assert torch.equal(one[:, 1:2], draws(Sampling(temperature=1.0, seed=8), rows=1))
    assert len(one.flatten().unique()) > 50
    for seed in (8, 7 + 2**32, 2**63 - 1):
        assert not torch.equal(one, draws(Sampling(temperature=1.0, seed=seed)))


def test_a_token_seen_in_the_prompt_or_drawn_before_is_penalized_and_padding_is_not() -> None:
    sampler = Sampler(Sampling(repetition_penalty=4.0), 3, 10, CPU)
    sampler.notice(torch.tensor([[7, 7, 3], [5, 0, 0], [0, 0, 0]]), torch.tensor([3, 1, 0]))
    assert [row.nonzero().flatten().tolist() for row in sampler.seen_BV] == [[3, 7], [5], []]
    logits = torch.zeros(3, 10).index_fill(1, torch.tensor([7]), 2.0).index_fill(1, torch.tensor([2]), 1.0)
    assert sampler.next_tokens(logits).tolist() == [2, 7, 7]
    assert sampler.next_tokens(logits).tolist() == [7, 2, 2]
    sampler.start(Sampling(repetition_penalty=4.0))
    assert not sampler.seen_BV.any()


def test_noise_is_finite_and_even() -> None:
    sampler = Sampler(replace(Sampling(temperature=1.0), seed=2), 1, 200_000, CPU)
    noise = sampler._noise()
    assert torch.isfinite(noise).all() and abs(noise.mean().item() - 0.5772) < 0.01
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


def test_the_form_says_which_settings_are_in_use() -> None:
    assert Sampling(top_k=3, top_p=0.5, min_p=0.1).form == (False, 0, False, False, False)
    assert Sampling(1.0, 3, 0.5, 0.1, 1.5).form == (True, 3, True, True, True)
    assert Sampling(1.0).form == (True, 0, False, False, False) and Sampling(1e-20).form[0]


def test_the_noise_is_the_same_on_every_machine() -> None:
    """MurmurHash3 of 0, 1 and all ones, and what a seed draws of even probabilities."""
    assert mixed(torch.tensor([0, 1, 2**32 - 1])).tolist() == [0, 0x514E28B7, 0x81F16F39]
    sampler = Sampler(Sampling(1.0, seed=2**40 + 5), 3, 1000, torch.device("cpu"))
    drawn = [sampler.next_tokens(torch.zeros(3, 1000)).tolist() for _ in range(4)]
    check_golden("drawn_tokens.txt", "\n".join(map(str, drawn)) + "\n")
