"""Networks that spandrel knows: its package is planted, with the names that 0.4 has."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from redline.errors import ModelError
from redline.upscale.network import load_network
from redline.upscale.session import Upscaling
from redline.upscale.settings import UpscaleSettings
from redline.upscale.tasks import Task


class Twice(nn.Module):
    """Gives more than the image, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.scale).repeat_interleave(2, -1).repeat_interleave(2, -2), x


@dataclass
class ImageModelDescriptor:
    model: nn.Module = field(default_factory=Twice)
    purpose: str = "SR"
    scale: int = 2
    input_channels: int = 3
    output_channels: int = 3
    architecture: object = field(default_factory=lambda: SimpleNamespace(name="MMRealSR"))
    size_requirements: object = field(default_factory=lambda: SimpleNamespace(minimum=0, multiple_of=4, square=False))
    _call_fn: Callable[[nn.Module, Tensor], Tensor] = lambda model, image: model(image)[0]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "other.safetensors"
    save_file(Twice().state_dict(), path)
    return path


def plant(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    class ModelLoader:
        def load_from_state_dict(self, state: dict[str, Tensor]) -> object:
            assert list(state) == ["scale"]
            if isinstance(found, Exception):
                raise found
            return found

    spandrel = ModuleType("spandrel")
    spandrel.__spec__ = ModuleSpec("spandrel", None)
    spandrel.ModelLoader, spandrel.ImageModelDescriptor = ModelLoader, ImageModelDescriptor
    monkeypatch.setitem(sys.modules, "spandrel", spandrel)


def test_runs_through_the_same_pipeline(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ImageModelDescriptor())
    samples = np.random.default_rng(0).integers(0, 256, (90, 133, 3), dtype=np.uint8)
    Image.fromarray(samples).save(tmp_path / "a.png")
    upscaling = Upscaling(UpscaleSettings(weights, device="cpu", precision="fp32", tile=80, tile_batch=2))
    assert (upscaling.network.name, upscaling.network.window) == ("MMRealSR ×2", 4)
    (outcome,) = upscaling.run([Task(tmp_path / "a.png", tmp_path / "b.png")])
    assert not outcome.error
    with Image.open(tmp_path / "b.png") as image:
        assert np.array_equal(np.asarray(image), samples.repeat(2, 0).repeat(2, 1))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (ImageModelDescriptor(purpose="FaceSR"), "is a MMRealSR, which is for faces only"),
        (
            ImageModelDescriptor(scale=1),
            "3 input and 3 output channels at ×1; 3 input and 3 output channels at ×2 or more are needed",
        ),
        (ImageModelDescriptor(input_channels=1), "1 input and 3 output channels at ×2"),
        (SimpleNamespace(architecture=SimpleNamespace(name="a video's")), "needs more than one input image"),
        (KeyError(), r"spandrel does not support it either \(KeyError\)"),
    ],
)
def test_what_enlarges_no_pictures_is_refused(
    found: object, sentence: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, found)
    with pytest.raises(ModelError, match=sentence):
        load_network(weights)


def test_without_it_the_extra_is_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spandrel", None)
    monkeypatch.setattr("redline.upscale.network.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"run with spandrel: pip install 'redline\[spandrel\]'"):
        load_network(weights)
