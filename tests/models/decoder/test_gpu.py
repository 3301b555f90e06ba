"""On a GPU: losses and gradients of packed batches against the CPU's, plain and fused, compiled too."""

import copy

import pytest
import torch
from torch import Tensor

from redline.models.decoder import Decoder, DecoderConfig
from redline.nn.choosing import Choosing
from redline.nn.packing import Packing

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
        if isinstance(module, Choosing):
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
