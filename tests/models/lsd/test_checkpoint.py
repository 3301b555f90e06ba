"""What is saved loads as the same model; a file that is not exactly one is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redline.errors import ModelError
from redline.models.lsd import Lsd, LsdConfig, load_lsd, read_about, save_lsd

CONFIG = LsdConfig(patch=2, width=8, multipliers=(1, 2), blocks=1, attending=1, control=8)


def forward(model: Lsd) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    noisy, frame, previous = torch.rand(3, 1, 3, 9, 10, generator=generator)
    with torch.no_grad():
        return model(noisy, frame, previous, torch.tensor([999]), torch.full((1, model.config.control), 0.5))


@pytest.mark.parametrize(
    "config", [CONFIG, LsdConfig(4, 16, (1, 2, 2), 2, 0, 16), LsdConfig(1, 8, (1, 3), 1, 2, 8)], ids=str
)
def test_what_is_saved_loads_as_the_same_model(tmp_path: Path, config: LsdConfig) -> None:
    model = Lsd(config).eval()
    save_lsd(model, tmp_path / "out.safetensors", about={"made": "by a test"})
    loaded = load_lsd(tmp_path / "out.safetensors")
    assert loaded.config == config and not loaded.training and torch.equal(forward(loaded), forward(model))
    assert read_about(tmp_path / "out.safetensors")["made"] == "by a test"
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_half_precision_files_load_as_fp32(tmp_path: Path) -> None:
    model = Lsd(CONFIG)
    save_lsd(model, tmp_path / "half.safetensors", torch.float16)
    loaded = load_lsd(tmp_path / "half.safetensors")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.head.weight, model.head.weight.half().float())
    with torch.no_grad():
        model.head.bias[0] = 1e6
    with pytest.raises(ModelError, match="'head.bias' has values that are not finite in float16"):
        save_lsd(model, tmp_path / "half.safetensors", torch.float16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head.bias": None}, r"1 weights are missing \(head.bias …\)"),
        ({"extra": torch.zeros(3)}, r"1 weights are unexpected \(extra …\)"),
        ({"head.bias": torch.zeros(3)}, r"head.bias is \(3,\), not \(24,\)"),
        ({"head.bias": torch.full((24,), float("nan"))}, "is damaged: 'head.bias' has values that are not finite"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "model.safetensors"
    save_lsd(Lsd(CONFIG), path)
    tensors = {name: tensor for name, tensor in {**load_file(path), **change}.items() if tensor is not None}
    save_file(tensors, path, metadata=read_about(path))
    with pytest.raises(ModelError, match=sentence) as seen:
        load_lsd(path)
    assert str(seen.value).endswith(".") and "\n" not in str(seen.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "the config in the header of .* cannot be read"),
        ("[1]", "the config in the header of .* is not a JSON object"),
        (json.dumps({**CONFIG.to_dict(), "depth": 3}), "unknown key 'depth' in the header of"),
        (
            json.dumps({**CONFIG.to_dict(), "width": "wide"}),
            "width = 'wide' in .* must be a whole number",
        ),
        (json.dumps({**CONFIG.to_dict(), "width": True}), "width = True in"),
        (json.dumps({**CONFIG.to_dict(), "width": [8]}), r"width = \[8\] in"),
        (json.dumps({**CONFIG.to_dict(), "multipliers": 2}), r"multipliers = \[2\] in"),
        (json.dumps({**CONFIG.to_dict(), "multipliers": [1, 2.5]}), r"multipliers = \[1, 2.5\] in"),
        (json.dumps({**CONFIG.to_dict(), "width": 12}), "width = 12 .* a multiple of 8"),
    ],
)
def test_headers_that_describe_no_model(tmp_path: Path, config: str, sentence: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"architecture": "lsd", "config": config})
    with pytest.raises(ModelError, match=sentence):
        load_lsd(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    save_lsd(Lsd(CONFIG), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-50])
    (tmp_path / "text.safetensors").write_text("no weights")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "folder.safetensors").mkdir()
    for name, sentence in (
        ("other", "is not an LSD model: its header has no architecture"),
        ("cut", "is not a readable safetensors file"),
        ("text", "is not a readable safetensors file"),
        ("empty", "is not a readable safetensors file"),
        ("folder", "is a folder"),
        ("missing", "No such file or directory"),
    ):
        with pytest.raises(ModelError, match=sentence):
            load_lsd(tmp_path / f"{name}.safetensors")
