"""Tests the reference and the tables of rotary embedding against transformers, and properties of a rotation."""

from types import SimpleNamespace

import pytest
import torch

from redline.errors import ModelError
from redline.ops.rope import LinearScaling, Llama3Scaling, frequencies, rope, rope_tables

LLAMA_3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_agrees_with_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 11, 6, 32), torch.randn(2, 11, 2, 32)
    cos, sin = rope_tables(50, 32, 10_000.0)
    positions = torch.randint(50, (2, 11))
    wide = [torch.cat((table[positions],) * 2, -1) for table in (cos, sin)]
    expected = llama.apply_rotary_pos_emb(q, k, *wide, unsqueeze_dim=2)
    torch.testing.assert_close(rope(q, k, cos, sin, positions), expected)


@pytest.mark.parametrize(
    ("kind", "scaling", "parameters"),
    [
        ("linear", None, {"factor": 1.0}),
        ("linear", LinearScaling(2.5), {"factor": 2.5}),
        ("llama3", LLAMA_3, vars(LLAMA_3)),
        ("llama3", Llama3Scaling(32.0, 1.0, 3.0, 4096), vars(Llama3Scaling(32.0, 1.0, 3.0, 4096))),
    ],
)
@pytest.mark.parametrize(("head_dim", "base"), [(64, 10_000.0), (128, 500_000.0)])
def test_frequencies_agree_with_transformers(
    kind: str, scaling: LinearScaling | Llama3Scaling | None, parameters: dict[str, object], head_dim: int, base: float
) -> None:
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = SimpleNamespace(
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
        standardize_rope_params=lambda: None,
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131_072,
    )
    expected, factor = functions[kind](config, "cpu")
    assert factor == 1.0
    torch.testing.assert_close(frequencies(head_dim, base, scaling).float(), expected, atol=0, rtol=2e-6)


def test_tables_are_exact_at_large_positions() -> None:
    cos, sin = rope_tables(1_000_000, 8, 10_000.0)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (1_000_000, 4)
    angle = 999_999 * torch.tensor(10_000.0, dtype=torch.float64) ** -0.25
    torch.testing.assert_close(cos[-1, 1].double(), angle.cos(), atol=1e-7, rtol=0)
    torch.testing.assert_close(sin[-1, 1].double(), angle.sin(), atol=1e-7, rtol=0)


def test_scores_depend_only_on_the_distance() -> None:
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)
    cos, sin = rope_tables(100, 16)

    def score(at: int, other: int) -> torch.Tensor:
        (turned, _), (_, key) = (rope(q, k, cos, sin, torch.tensor([[place]])) for place in (at, other))
        return (turned * key).sum()

    torch.testing.assert_close(score(7, 3), score(97, 93), atol=1e-5, rtol=1e-5)
    assert max((score(7, 3) - score(7, other)).abs() for other in (0, 1, 2, 4, 5, 6)) > 1e-3


def test_without_positions_tokens_count_from_the_start() -> None:
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    cos, sin = rope_tables(9, 8)
    expected = rope(q, k, cos, sin, torch.arange(5, dtype=torch.int32).expand(2, 5))
    torch.testing.assert_close(rope(q, k, cos, sin), expected)


def test_gradients() -> None:
    q = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 3, 1, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_tables(3, 6)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((4, 7), "head_dim must be even and at least 2, not 7"),
        ((4, 8, 0.0), "base must be more than 0"),
        ((4, 8, 1e4, LinearScaling(0.0)), "factor must be more than 0"),
        ((4, 8, 1e4, Llama3Scaling(8.0, 4.0, 1.0, 8192)), "0 < low_freq_factor < high_freq_factor, not 4.0 and 1.0"),
    ],
)
def test_invalid_tables_are_refused(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        rope_tables(*arguments)
