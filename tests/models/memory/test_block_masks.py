"""The blocks that flex attention computes hold all pairs that see each other, and full blocks hold no other."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from redline.models.memory import TitanConfig, TitanModel, windowed_attention
from redline.models.memory.token_positions import BlockMasks, TokenPositions
from redline.nn import causal_attention
from redline.nn.packing import Packing
from redline.ops.causal_attention import Far, reference
from redline.training.determinism import deterministic

BLOCK = 128
SMALL = TitanConfig(vocabulary=211, width=64, layers=2, heads=4, attention_every=1, segment=32)


def reference_of_stretches(
    q: Tensor, k: Tensor, v: Tensor, lowest: Tensor, implementation: str, *, far: Far | None
) -> Tensor:
    assert implementation == "triton"
    return reference.causal_attention(q, k, v, lowest, far)


def pairs(packing: Packing, segment: int, window: int, beyond: bool) -> Tensor:
    segments = packing.positions_BS // segment
    age = segments[:, :, None] - segments[:, None]
    earlier = torch.ones_like(age, dtype=torch.bool).tril()
    return earlier & packing.same_BSS & (age > window if beyond else age <= window)


def listed(counts: Tensor, which: Tensor) -> Tensor:
    """(B, N, N): whether one block lists another."""
    found = torch.zeros(which.shape, dtype=torch.bool)
    for batch, head, row in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        found[batch, head, row, which[batch, head, row, : counts[batch, head, row]].long()] = True
    return found[:, 0]


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize(
    ("length", "segment", "window", "rate"),
    [
        (1000, 32, 2, 0.003),
        (1024, 128, 1, 0.0),
        (1024, 100, 0, 0.0),
        (777, 7, 3, 0.02),
        (1280, 300, 2, 0.001),
        (128, 16, 1, 0.0),
        (5, 4, 0, 0.3),
    ],
)
def test_no_visible_pair_is_skipped(length: int, segment: int, window: int, rate: float, beyond: bool) -> None:
    torch.manual_seed(length)
    packing = Packing.of((torch.rand(3, length) < rate).cumsum(1))
    seen_by = BlockMasks.of(packing.positions_BS, packing.documents_BS, segment, window, with_beyond=beyond)
    mask = seen_by.beyond if beyond else seen_by.near
    assert mask is not None
    assert mask.seq_lengths == (length, length) and mask.BLOCK_SIZE == (BLOCK, BLOCK)
    blocks = -(-length // BLOCK)
    sides = (3, blocks, BLOCK, blocks, BLOCK)
    room = blocks * BLOCK - length
    seen = pairs(packing, segment, window, beyond)
    seen = torch.nn.functional.pad(seen, (0, room, 0, room)).reshape(sides).transpose(2, 3)
    partly = listed(mask.kv_num_blocks, mask.kv_indices)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partly & full).any()
    for of_keys, counts, which in (
        (partly, mask.q_num_blocks, mask.q_indices),
        (full, mask.full_q_num_blocks, mask.full_q_indices),
    ):
        assert counts is not None and which is not None
        assert torch.equal(listed(counts, which), of_keys.mT)
        # Each block stands somewhere once, in order on both sides of what is seen.
        assert torch.equal(which.sort(-1).values, torch.arange(which.shape[-1]).expand_as(which).int())
    assert not (seen.any(-1).any(-1) & ~(partly | full)).any()
    assert not (full & ~seen.all(-1).all(-1)).any()
    if not rate:  # of one document nothing is listed for nothing, and what can be full is
        assert torch.equal(full, seen.all(-1).all(-1))
        assert torch.equal(partly | full, seen.any(-1).any(-1))


def test_mask_functions_match_the_block_lists() -> None:
    torch.manual_seed(0)
    packing = Packing.of((torch.rand(2, 90) < 0.05).cumsum(1))
    found = BlockMasks.of(packing.positions_BS, packing.documents_BS, 8, 1, with_beyond=True)
    assert found.beyond is not None
    for mask, beyond in ((found.near, False), (found.beyond, True)):
        made = flex_attention.create_mask(mask.mask_mod, 2, None, 90, 90, device="cpu")[:, 0]
        assert torch.equal(made, pairs(packing, 8, 1, beyond))


def test_recomputed_blocks_stay_in_one_graph_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the kernels: what is computed is plain flex attention, whose gradient the CPU has too."""
    whole = TokenPositions.whole
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)

    def with_seen(tokens_BS: Tensor, documents: Packing, config: TitanConfig) -> TokenPositions:
        positions = whole(tokens_BS, documents, config)
        window = config.segment, config.window_segments
        return replace(positions, block_masks=BlockMasks.of(positions.positions_BS, positions.documents_BS, *window))

    torch.manual_seed(0)
    model, compiled = TitanModel(SMALL).train(), TitanModel(SMALL).train()
    compiled.load_state_dict(model.state_dict())
    graphs = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    for block in compiled.blocks:
        forward = block.forward
        block.forward = torch.compile(
            lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False),
            backend=graphs,
            fullgraph=True,
        )
    for _ in range(3):
        tokens, documents = torch.randint(211, (2, 150)), (torch.rand(2, 150) < 0.02).cumsum(1)
        given = tokens, tokens.roll(-1, 1), Packing.of(documents)
        expected = model.loss(*given)
        with monkeypatch.context() as patch:
            patch.setattr(TokenPositions, "whole", with_seen)
            loss = compiled.loss(*given)
        torch.testing.assert_close(loss, expected)
        wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
        found = torch.autograd.grad(loss, list(compiled.parameters()), allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    # One for each block, and none anew for the batches that follow.
    assert graphs.frame_count == SMALL.layers


@pytest.mark.parametrize("in_order", [False, True])
def test_flex_attention_beyond_the_window_matches_the_reference(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where gradients are to repeat there is no bias, which all queries would add to; some tokens are worth nothing."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention.flex_attention, backend="aot_eager")
    monkeypatch.setattr(windowed_attention, "_compiled", lambda: compiled)
    torch.manual_seed(0)
    packing = Packing.of((torch.rand(2, 150) < 0.02).cumsum(1))
    block_masks = BlockMasks.of(packing.positions_BS, packing.documents_BS, 8, 1, with_beyond=True)
    sizes = (4, 32), (2, 32), (2, 32), (4, 32), (2, 32)
    query, key, value, far_query, far_key = (torch.randn(2, 150, *size).requires_grad_() for size in sizes)
    score = (torch.randn(2, 150) * 4 - 60 * torch.tensor([[0], [1]])).index_fill_(1, torch.arange(0, 150, 7), -200.0)
    score.requires_grad_()
    given, pull = (query, key, value, far_query, far_key, score), torch.randn(2, 150, 4, 32)

    def with_gradients(attend: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor]) -> tuple[Tensor, ...]:
        mixed = attend((far_query, far_key, torch.nn.functional.logsigmoid(score)))
        return mixed, *torch.autograd.grad(mixed, given, pull)

    places = packing.positions_BS, packing.documents_BS, 8, 1
    expected = with_gradients(lambda far: windowed_attention.reference_attention(query, key, value, *places, far))
    with deterministic(in_order):
        found = with_gradients(lambda far: windowed_attention._by_flex_attention(query, key, value, block_masks, far))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("banked", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_stretch_kernels_match_the_reference(window: int, banked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed_attention, "span_kernels_are_faster", lambda *_: True)
    monkeypatch.setattr(causal_attention, "span_attention_op", reference_of_stretches)
    torch.manual_seed(0)
    packing = Packing.of((torch.rand(2, 90) < 0.03).cumsum(1))
    query, key, value = (torch.randn(2, 90, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    positions = replace(TokenPositions.whole(torch.zeros(2, 90, dtype=torch.int64), packing, SMALL), block_masks=None)
    far = None
    if banked:
        far = torch.randn_like(query), torch.randn_like(key), torch.randn(2, 90, dtype=torch.float64)
    expected = windowed_attention.windowed_attention(query, key, value, positions, 8, window, far)
    found = windowed_attention.windowed_attention(query, key, value, positions, 8, window, far, "auto")
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(
        found, windowed_attention.windowed_attention(query, key, value, positions, 8, window + 1, far)
    )


def test_scores_that_are_all_low_are_not_lost_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention.flex_attention, backend="aot_eager")
    monkeypatch.setattr(windowed_attention, "_compiled", lambda: compiled)
    torch.manual_seed(0)
    packing = Packing.of(torch.zeros(2, 90, dtype=torch.int64))
    beyond = BlockMasks.of(packing.positions_BS, None, 8, 1, with_beyond=True).beyond
    query, key, value = (torch.randn(2, 90, heads, 32).half() for heads in (4, 2, 2))
    bias = torch.randn(2, 90) - 25
    expected, weight = windowed_attention._beyond(query, key, bias, value, beyond)
    found, weight_in_order = windowed_attention._deterministic_beyond(query, key, bias, value, beyond)
    # The first tokens see nothing beyond the window.
    assert torch.isfinite(weight[..., 16:]).all() and (weight[..., :16] == -torch.inf).all()
    torch.testing.assert_close(weight_in_order, weight, rtol=0, atol=5e-3)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
