"""Tests that under autocast the residual sum keeps its precision."""

import torch

from redline.models.decoder import Decoder, DecoderConfig
from redline.nn.rms_norm import RMSNorm


def test_under_autocast_the_sum_keeps_its_precision() -> None:
    norm, branch, residual = RMSNorm(8), torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, added = norm.add(branch, residual)
    assert added.dtype == out.dtype == torch.float32
    assert torch.equal(added, residual + branch.float())


def test_a_decoder_runs_and_learns_under_autocast() -> None:
    model = Decoder(DecoderConfig(vocabulary=61, width=32, layers=2, heads=2, mlp_width=48, context=32)).eval()
    tokens = torch.randint(61, (2, 20))
    expected, cache = model(tokens), model.new_cache(2, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
        model.loss(tokens, tokens).backward()
        with torch.no_grad():
            model.prefill(tokens[:, :19], torch.tensor([19, 19]), cache)
            stepped = model.prefill(tokens[:, 19:20], torch.tensor([1, 1]), cache)
    for one, other in ((found, expected), (stepped, expected[:, -1])):
        assert (one.float() - other).norm() / other.norm() < 0.02
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
