"""The architectures alone: their sizes, their shapes, and that every input counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redline.models.gpt import GPT
from redline.models.resnet import ResNet
from redline.models.unet import STEPS, VideoUNet
from redline.models.vit import Attention, VisionTransformer


def millions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


def change(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize(("base", "low", "high"), [(64, 98, 102), (128, 382, 398), (192, 862, 898)])
def test_unet_sizes(base: int, low: float, high: float) -> None:
    with torch.device("meta"):
        assert low <= millions(VideoUNet(base)) <= high


def test_unet_bottom_convolutions_are_the_324_mib_ones() -> None:
    with torch.device("meta"):
        model = VideoUNet(192)
    for net in (model.draft, model.refine):
        for convolution in (net.bottom.conv1, net.bottom.conv2):
            assert convolution.weight.shape == (3072, 3072, 3, 3)
            assert convolution.weight.nbytes == 324 * 2**20


def test_other_sizes() -> None:
    with torch.device("meta"):
        assert millions(ResNet()) == pytest.approx(11.689512)  # as published for ResNet-18
        assert millions(VisionTransformer()) == pytest.approx(22.050664)  # as published for ViT-S/16
        assert 124 < millions(GPT(50304, 1024, 768, 12, 12)) < 125


@torch.no_grad()
def test_unet_reacts_to_every_input() -> None:
    torch.manual_seed(0)
    model = VideoUNet(8).eval()
    frame, previous = torch.randn(2, 1, 3, 64, 64).unbind(0)
    timestep = torch.tensor([400])
    output = model(frame, timestep, previous)
    assert output.shape == frame.shape
    assert torch.equal(output, model(frame, timestep, previous))
    assert change(output, model(torch.randn_like(frame), timestep, previous)) > 0.1
    assert change(output, model(frame, timestep, torch.randn_like(previous))) > 0.1
    assert change(output, model(frame, torch.tensor([100]), previous)) > 1e-2
    assert change(output, model(frame, timestep + 1, previous)) > 1e-3
    assert change(output, model(frame + 0.01 * torch.randn_like(frame), timestep, previous)) > 1e-3


@torch.no_grad()
def test_unet_bottom_and_attention_reach_the_output() -> None:
    torch.manual_seed(0)
    model = VideoUNet(8).eval()
    frame, previous = torch.randn(2, 1, 3, 32, 48).unbind(0)
    timestep = torch.tensor([STEPS - 1])
    output = model(frame, timestep, previous)
    for name in (
        "draft.bottom.conv2",
        "refine.bottom_attention.out",
        "refine.encoder_attention.out",
        "draft.film",
    ):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        before = weight.clone()
        weight.zero_()
        assert change(output, model(frame, timestep, previous)) > 0.02, name
        weight.copy_(before)


@torch.no_grad()
def test_unet_samples_of_a_batch_do_not_mix() -> None:
    torch.manual_seed(0)
    model = VideoUNet(8).eval()
    frame, previous = torch.randn(2, 2, 3, 32, 32).unbind(0)
    timestep = torch.tensor([3, 700])
    together = model(frame, timestep, previous)
    for index in range(2):
        alone = model(*(x[index : index + 1] for x in (frame, timestep, previous)))
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-4, atol=1e-5)


def test_unet_state_dict_holds_parameters_only() -> None:
    with torch.device("meta"):
        model = VideoUNet(8)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_unet_time_survives_half_precision() -> None:
    model = VideoUNet(8)
    table = model.draft.sinusoids[torch.tensor([998, 999])]
    model.to(torch.bfloat16)
    rounded = model.draft.sinusoids[torch.tensor([998, 999])].float()
    assert change(table, rounded) < 2**-8
    assert change(rounded[0], rounded[1]) > 0.1  # in bf16 the step 999 itself would read as 1000


@torch.no_grad()
def test_hand_written_attention_is_attention() -> None:
    torch.manual_seed(0)
    attention = Attention(48, 3).double()
    x = torch.randn(2, 7, 48, dtype=torch.float64)
    q, k, v = (part.view(2, 7, 3, 16).transpose(1, 2) for part in attention.qkv(x).split(48, dim=2))
    expected = attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_gpt_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(97, 16, 32, 2, 4).eval()
    tokens = torch.randint(97, (2, 13))
    logits = model(tokens)
    assert logits.shape == (2, 13, 97)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    after = model(changed)
    torch.testing.assert_close(after[:, :9], logits[:, :9], rtol=0, atol=1e-6)
    assert all(change(logits[:, t], after[:, t]) > 1e-4 for t in range(9, 13))


def test_impossible_sizes_raise_by_name() -> None:
    with pytest.raises(ValueError, match="base width 12"):
        VideoUNet(12)
    with pytest.raises(ValueError, match="heads 5"):
        VisionTransformer(width=384, heads=5)
    with pytest.raises(ValueError, match="patch 16"):
        VisionTransformer(size=100)
    with pytest.raises(ValueError, match="9 tokens"):
        GPT(10, 8, 8, 1, 1)(torch.zeros(1, 9, dtype=torch.long))
