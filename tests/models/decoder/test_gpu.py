"""On a GPU: losses and gradients of packed batches against the CPU's, plain and fused, compiled too."""

import copy

import pytest
import torch
from torch import Tensor

from redline.models.decoder import Decoder, DecoderConfig
from redline.nn.packing import Packing
from redline.nn.switchable import SwitchableModule

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(
    1000, 256, 3, 4, 512, key_value_heads=2, head_dim=64, context=512, query_key_norm=True, windows=(None, 100, None)
)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(1000, (3, 300))
    return tokens, tokens.roll(-1, 1), (torch.rand(3, 300) < 0.02).cumsum(1)


def gradients(model: Decoder, loss: Tensor) -> list[Tensor]:
    return [g.float().cpu() for g in torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("implementation", ["reference", "auto"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_training_in_bf16_follows_the_cpu(implementation: str, compiled: bool) -> None:
    model = Decoder(CONFIG)
    half = copy.deepcopy(model).to("cuda", torch.bfloat16)
    for module in half.modules():
        if isinstance(module, SwitchableModule):
            module.implementation = implementation
    tokens, targets, documents = batch()
    expected = model.loss(tokens, targets, documents)
    wanted = gradients(model, expected)
    run = torch.compile(half.loss, fullgraph=True) if compiled else half.loss
    loss = run(tokens.cuda(), targets.cuda(), Packing.of(documents).to("cuda"))
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
    for one, other in zip(gradients(half, loss), wanted, strict=True):
        assert (one - other).norm() < 0.1 * other.norm()


def test_a_document_does_not_see_its_neighbour() -> None:
    model = Decoder(CONFIG).to("cuda", torch.bfloat16)
    tokens, _, _ = batch()
    tokens, packing = tokens.cuda(), Packing.of((torch.arange(300) >= 170).long().expand(3, -1)).to("cuda")
    with torch.no_grad():
        before = model(tokens, packing)
        tokens[:, :170] = torch.randint_like(tokens[:, :170], 1000)
        after = model(tokens, packing)
    assert torch.equal(before[:, 170:], after[:, 170:]) and not torch.equal(before[:, :170], after[:, :170])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[64] * 3, [64, 64, 30]], ids=["level", "ragged"])
@torch.no_grad()
def test_a_prompt_in_chunks_gives_what_one_pass_gives(counts: list[int], dtype: torch.dtype) -> None:
    """With shared heads and a window, where all rows hold as many tokens and where they do not."""
    model = Decoder(CONFIG).eval()
    tokens = torch.randint(1000, (3, 256))
    half = copy.deepcopy(model).to("cuda", dtype)
    cache = half.new_cache(3, 300)
    limit = 0.05 if dtype == torch.bfloat16 else 1e-4
    for begin in range(0, 256, 64):
        # The rows of a ragged batch leave tokens out, so that each has a text of its own.
        taken = torch.tensor(counts)
        logits = half.prefill(tokens[:, begin : begin + 64].cuda(), taken.cuda(), cache)
        for row, count in enumerate(counts):
            text = torch.cat([tokens[row, at : at + count] for at in range(0, begin + 64, 64)])[None]
            expected = model(text)[0, -1]
            assert (logits[row].float().cpu() - expected).norm() <= limit * expected.norm(), (begin, row)
