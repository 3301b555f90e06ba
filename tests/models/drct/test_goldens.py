"""The original implementation's outputs, for weights and pictures that are drawn from the names and sizes alone."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.models.drct import Drct, DrctConfig

GOLDENS = Path(__file__).parents[2] / "data" / "drct_goldens.npz"
# scale, groups, batch, height, width, parameters, and the step at which rows and columns of the output were kept
CASES = {
    "drct-x4-2groups": (4, 2, 1, 64, 64, 5_178_819, 5),
    "drct-x2-2groups-batch2": (2, 2, 2, 48, 80, 5_031_107, 3),
    "drct-x3-1group": (3, 1, 1, 32, 32, 2_975_557, 1),
}


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    values = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).standard_normal(shape)
    if name.endswith("relative_position_bias_table"):
        values *= 0.5
    elif len(shape) >= 2:
        values /= np.sqrt(np.prod(shape[1:]))
    else:
        values = 1 + 0.1 * values if name.endswith("weight") else 0.1 * values
    return torch.from_numpy(values.astype(np.float32))


def fill(model: Drct) -> Drct:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape)))
    return model.eval()


def picture(batch: int, height: int, width: int) -> Tensor:
    """Smooth, with edges."""
    rng = np.random.Generator(np.random.PCG64(batch * 1_000_003 + height * 1009 + width))
    y, x = np.mgrid[0:height, 0:width] / 16.0
    frames = []
    for _ in range(batch):
        phases = enumerate(rng.uniform(0, 6.28, size=(3, 2)))
        edges = 0.2 * ((x + y) % 2 > 1)
        frames.append([0.5 + 0.25 * np.sin(x * (1 + c) + p[0]) * np.cos(y + p[1]) + edges for c, p in phases])
    return torch.from_numpy(np.clip(np.array(frames), 0, 1).astype(np.float32))


# That packing changes nothing at any size, test_in_windows holds.
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("drct-x4-2groups", False),
        ("drct-x2-2groups-batch2", True),
        ("drct-x3-1group", False),
        ("drct-x3-1group", True),
        pytest.param("drct-x4-2groups", True, marks=pytest.mark.slow),
        pytest.param("drct-x2-2groups-batch2", False, marks=pytest.mark.slow),
    ],
)
def test_agrees_with_the_original(name: str, packed: bool) -> None:
    scale, groups, batch, height, width, parameters, step = CASES[name]
    model = fill(Drct(DrctConfig.of(scale, groups)))
    assert sum(p.numel() for p in model.parameters()) == parameters
    if packed:
        model.pack(torch.device("cpu"))
    with torch.no_grad():
        output = model(picture(batch, height, width))
    assert output.shape == (batch, 3, scale * height, scale * width)
    golden = torch.from_numpy(np.load(GOLDENS)[name])
    torch.testing.assert_close(output[..., ::step, ::step], golden, atol=1e-4, rtol=0)


# Elsewhere it takes minutes; that bf16 is near fp32, test_in_windows and test_shipped hold on any CPU.
@pytest.mark.skipif("bf16" not in Machine.detect("cpu").hardware_dtypes, reason="this CPU has no bf16")
@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("name", CASES)
def test_bf16_stays_near_the_original(name: str) -> None:
    scale, groups, batch, height, width, _, step = CASES[name]
    given = picture(batch, height, width)
    fast = Plan.parse("fused_ops + bf16").apply(fill(Drct(DrctConfig.of(scale, groups))), samples=given)
    with torch.no_grad():
        output = fast(given)[..., ::step, ::step]
    off = output - torch.from_numpy(np.load(GOLDENS)[name])
    assert -10 * off.double().square().mean().log10() >= 40  # dB, of a range of 1


@pytest.mark.parametrize(
    ("scale", "groups", "parameters"),
    [
        (2, 6, 13_991_867),
        (3, 6, 14_176_507),
        (4, 6, 14_139_579),
        (2, 12, 27_433_007),
        (3, 12, 27_617_647),
        (4, 12, 27_580_719),
    ],
)
def test_the_published_sizes(scale: int, groups: int, parameters: int) -> None:
    with torch.device("meta"):
        model = Drct(DrctConfig.of(scale, groups))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert str(model.config) == f"{'DRCT' if groups == 6 else 'DRCT-L'} ×{scale}"
