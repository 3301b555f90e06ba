"""The decoder as training uses it: causal, documents apart, the loss, conversions; and what it refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError
from redline.ladder.plan import Plan
from redline.models.decoder import Decoder, DecoderConfig
from redline.nn.packing import Packing
from redline.ops.rope import Llama3Scaling

CONFIG = DecoderConfig(
    vocabulary=61,
    width=40,
    layers=3,
    heads=6,
    mlp_width=56,
    key_value_heads=2,
    head_dim=10,
    context=64,
    rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 16),
    qkv_bias=True,
    query_key_norm=True,
    windows=(None, 5, None),
)


def decoder(**changes: object) -> Decoder:
    model = Decoder(replace(CONFIG, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_parameters_are_counted_without_building() -> None:
    for changes in ({}, {"tied_embeddings": True}, {"out_bias": True, "query_key_norm": False}):
        model = decoder(**changes)
        assert sum(p.numel() for p in model.parameters()) == model.config.parameters


@torch.no_grad()
def test_a_later_token_changes_nothing_before_it() -> None:
    model, tokens = decoder(), torch.randint(61, (2, 23))
    before = model(tokens)
    tokens[:, 14] = (tokens[:, 14] + 1) % 61
    after = model(tokens)
    assert torch.equal(before[:, :14], after[:, :14])
    assert (before[:, 14:] != after[:, 14:]).flatten(2).any(dim=2).all()


@torch.no_grad()
def test_a_window_hides_what_is_further_back() -> None:
    model, tokens = decoder(windows=(4, 4, 4)), torch.randint(61, (1, 30))
    before = model(tokens)
    tokens[:, 5] = (tokens[:, 5] + 1) % 61
    changed = (before != model(tokens)).any(dim=2)[0].nonzero().flatten()
    # Three layers of four tokens each reach back nine.
    assert changed.tolist() == list(range(5, 15))


@torch.no_grad()
@pytest.mark.parametrize("made", ["numbers", "packing"])
def test_packed_documents_equal_separate_ones(made: str) -> None:
    model = decoder()
    lengths = [[7, 1, 13], [2, 19]]
    tokens = torch.randint(61, (2, 21))
    # A number may come again later in the row: it is another document.
    numbers = torch.tensor([[4] * 7 + [9] + [4] * 13, [1] * 2 + [1 + 1] * 19])
    packed = model(tokens, numbers if made == "numbers" else Packing.of(numbers))
    for row, parts in enumerate(lengths):
        begin = 0
        for length in parts:
            alone = model(tokens[row : row + 1, begin : begin + length])[0]
            assert torch.allclose(packed[row, begin : begin + length], alone, atol=1e-5)
            begin += length


def test_positions_begin_anew_in_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from outside only their differences count, so what reaches the rotation is looked at."""
    seen: list[list[list[int]]] = []

    def spy(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, implementation: str
    ) -> tuple[Tensor, ...]:
        seen.append(positions.tolist())
        return q, k

    monkeypatch.setattr("redline.nn.attention.rope", spy)
    decoder()(torch.zeros(1, 6, dtype=torch.long), torch.tensor([[3, 3, 3, 5, 5, 3]]))
    assert seen == [[[0, 1, 2, 0, 1, 0]]] * 3


def test_the_loss_is_cross_entropy_of_the_logits_and_has_its_gradients() -> None:
    model, tokens = decoder(tied_embeddings=True), torch.randint(61, (2, 17))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(2, 17) < 0.2, -100)
    documents = torch.arange(17).div(6, rounding_mode="floor").expand(2, -1)
    expected = F.cross_entropy(model(tokens, documents).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model.loss(tokens, targets, documents, label_smoothing=0.1)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.allclose(loss, expected, atol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5) and other.abs().max() > 0


@torch.no_grad()
def test_other_precisions_agree_and_keep_exact_angles() -> None:
    model, tokens = decoder().double(), torch.randint(61, (1, 20))
    exact = model(tokens)
    assert model.tables.cos.dtype == torch.float32
    single = copy.deepcopy(model).float()
    assert (single(tokens) - exact).abs().max() < 1e-4
    half = copy.deepcopy(model).bfloat16()
    assert half.tables.cos.dtype == torch.float32 and half(tokens).dtype == torch.bfloat16
    assert (half(tokens) - exact).norm() < 0.1 * exact.norm()


def test_the_initial_loss_is_near_uniform() -> None:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    tokens = torch.randint(61, (4, 64))
    assert abs(model.loss(tokens, tokens.roll(-1, 1)).item() - torch.tensor(61.0).log().item()) < 0.1


def test_fused_ops_switches_every_module_and_changes_nothing_on_a_cpu() -> None:
    model, tokens = decoder().eval(), torch.randint(61, (1, 11))
    fast = Plan.parse("fused_ops").apply(model)
    with torch.no_grad():
        assert torch.allclose(fast(tokens), model(tokens), atol=1e-6)
    (rung,) = Plan.parse("fused_ops").rungs
    proof = rung.proof(fast.job)
    for words in ("13 RMSNorm by reference", "3 SwiGLU by reference", "3 GroupedQueryAttention by reference"):
        assert words in proof


def test_it_compiles_without_a_break_in_training() -> None:
    model = decoder(layers=1, windows=(5,))
    tokens = torch.randint(61, (2, 16))
    packing = Packing.of(torch.tensor([[0] * 9 + [1] * 7] * 2))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens, tokens, packing), model.loss(tokens, tokens, packing), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 7, "head_dim": 0}, "width .40. is not a multiple of heads .7."),
        ({"key_value_heads": 4}, "must be a multiple of key_value_heads .4."),
        ({"head_dim": 9}, "must be even for rotary positions, not 9"),
        ({"windows": (None,)}, "one entry for each of 3 layers, not 1"),
        ({"windows": (0, None, None)}, "windows = .* must be a list"),
        ({"layers": 0}, "layers = 0 must be"),
        ({"rope_base": 0.0}, "above 0"),
    ],
)
def test_invalid_configs_raise(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        replace(CONFIG, **changes)


def test_invalid_inputs_raise() -> None:
    model = decoder()
    for tokens, words in (
        (torch.zeros(1, 65, dtype=torch.long), "the model takes 1 to 64 tokens, not 65"),
        (torch.zeros(1, 0, dtype=torch.long), "1 to 64 tokens, not 0"),
        (torch.zeros(5, dtype=torch.long), "shape \\(batch, tokens\\)"),
        (torch.zeros(1, 5), "takes integers"),
    ):
        with pytest.raises(ModelError, match=words):
            model(tokens)
    with pytest.raises(ModelError, match="but the tokens"):
        model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
