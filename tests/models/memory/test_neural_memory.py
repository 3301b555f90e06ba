"""What a memory does before anything is learned: how fast it forgets, and how far one chunk may correct it."""

import pytest
import torch

from redline.models.memory.neural_memory import GatedDelta, Titans


@pytest.mark.parametrize(("heads", "speeds"), [(1, [0.001]), (2, [0.001, 0.1]), (3, [0.001, 0.01, 0.1])])
def test_heads_begin_to_forget_at_speeds_spread_evenly_in_log_space(heads: int, speeds: list[float]) -> None:
    update = GatedDelta(8, heads, 4)
    assert torch.nn.functional.softplus(update.decay_bias).tolist() == pytest.approx(speeds, rel=1e-4)
    assert update.new_state(2, 3, 5, torch.device("cpu"), torch.float64).shape == (2, heads, 3, 5)


def one_step(update: GatedDelta | Titans, monkeypatch: pytest.MonkeyPatch, function: str) -> list[torch.Tensor]:
    """The gates that the op is given for tokens of all zeros."""
    seen: list[torch.Tensor] = []

    def op(*given: torch.Tensor) -> tuple[None, None]:
        seen.extend(given[3:6])
        return None, None

    monkeypatch.setattr(f"redline.models.memory.neural_memory.{function}", op)
    x, q = torch.zeros(1, 2, 8), torch.zeros(1, 2, 3, 4)
    state = update.new_state(1, 4, 4, torch.device("cpu"), torch.float32)
    update(x, (q, q, q), state, None, "reference")
    return seen


def test_a_token_that_says_nothing_forgets_at_the_learned_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    update = GatedDelta(8, 3, 4)
    torch.nn.init.constant_(update.log_rate, 2.0)
    g, beta, _ = one_step(update, monkeypatch, "gated_delta_rule")
    expected = [-(2.718281828**2) * speed for speed in (0.001, 0.01, 0.1)]
    assert g[0, 0].tolist() == pytest.approx(expected, rel=1e-4)
    assert beta[0, 0].tolist() == pytest.approx([0.5] * 3)


def test_a_chunk_of_one_key_corrects_no_more_than_half_again_of_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, eta, theta = one_step(Titans(8, 3, 4), monkeypatch, "titans_memory")
    assert alpha[0, 0].tolist() == pytest.approx([0.0066929] * 3, rel=1e-4)
    assert eta[0, 0].tolist() == pytest.approx([0.5] * 3)
    assert theta[0, 0].tolist() == pytest.approx([1.5 / 4 * 0.5 * 0.5] * 3)
