"""Weight files: found out from their shapes, and nothing that does not fit is loaded."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from redline.errors import ModelError
from redline.models.drct import Drct, DrctConfig, load_drct, save_drct
from redline.models.drct.checkpoint import official_shape

SMALL = DrctConfig.of(4, 2, width=24, growth=8, features=12, window=4)


def official(config: DrctConfig = SMALL, seed: int = 0) -> dict[str, Tensor]:
    """As the original saves it: 1×1 convolutions with four dimensions, and two buffers beside the weights."""
    torch.manual_seed(seed)
    state = Drct(config).state_dict()
    weights = {name: tensor.reshape(official_shape(name, tensor)) for name, tensor in state.items()}
    weights["layers.0.swin1.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.long)
    weights["layers.0.swin2.attn_mask"] = torch.zeros(16, 16, 16)
    return weights


def test_a_model_is_named_by_its_groups() -> None:
    assert str(DrctConfig.of(4, 1)) == "DRCT of 1 group ×4" and str(DrctConfig.of(2, 12)) == "DRCT-L ×2"
    assert str(SMALL) == "DRCT of 2 groups ×4, width 24"


def same(model: Drct, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor.flatten(), weights[name].flatten()) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("wrapper", ["params_ema", "params", "state_dict", "model", None])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_every_wrapping(wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    weights = official()
    inner = OrderedDict((prefix + name, tensor) for name, tensor in weights.items())
    content: Any = {wrapper: inner, "iter": 7} if wrapper else inner
    torch.save(content, tmp_path / "weights.pth")
    model = load_drct(tmp_path / "weights.pth")
    assert model.config == SMALL and same(model, weights) and not model.training


def test_the_average_is_taken_before_the_last_step(tmp_path: Path) -> None:
    average, last = official(seed=1), official(seed=2)
    torch.save({"params": last, "params_ema": average}, tmp_path / "both.pth")
    assert same(load_drct(tmp_path / "both.pth"), average)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        DrctConfig.of(2, 1, width=18, growth=6, features=8, window=8),
        DrctConfig.of(3, 3, width=30, growth=4, features=16, window=2),
        DrctConfig(8, 1, 20, 4, 8, 4, heads=(2, 3, 4, 1, 6), mlp_widths=(8, 9, 10, 11, 12)),
    ],
    ids=str,
)
def test_what_is_saved_loads_as_the_same_model(config: DrctConfig, tmp_path: Path) -> None:
    model = Drct(config).eval()
    save_drct(model, tmp_path / "out.safetensors", about={"made": "by a test"})
    loaded = load_drct(tmp_path / "out.safetensors")
    side = 2 * config.window
    picture = torch.rand(1, 3, side, 2 * side)
    with torch.no_grad():
        assert loaded.config == config and torch.equal(loaded(picture), model(picture))
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_half_precision_files_load_as_fp32(tmp_path: Path) -> None:
    save_drct(Drct(SMALL), tmp_path / "half.safetensors", torch.float16)
    assert {p.dtype for p in load_drct(tmp_path / "half.safetensors").parameters()} == {torch.float32}


def test_a_group_too_few_or_a_layer_too_many_is_refused(tmp_path: Path) -> None:
    weights = official()
    for change, sentence in (
        ({"layers.1.swin3.mlp.fc1.bias": None}, "1 weights are missing .layers.1.swin3.mlp.fc1.bias"),
        ({"extra.weight": torch.zeros(3)}, "1 weights are unexpected .extra.weight"),
        ({"layers.1.norm.weight": torch.zeros(3)}, "1 weights are unexpected"),
        ({"conv_last.weight": torch.zeros(4, 12, 3, 3)}, r"conv_last.weight is \(4, 12, 3, 3\), not \(3, 12, 3, 3\)"),
        ({"conv_first.weight": None}, "is incomplete"),
        ({"norm.bias": torch.full((24,), float("nan"))}, "'norm.bias' has values that are not finite"),
    ):
        changed = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        torch.save(changed, tmp_path / "changed.pth")
        with pytest.raises(ModelError, match=sentence):
            load_drct(tmp_path / "changed.pth")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("SwinIR", "layers.0.residual_group.blocks.0.attn.qkv.weight"),
        ("HAT", "layers.0.residual_group.overlap_attn.qkv.weight"),
        ("RRDBNet", "body.0.rdb1.conv1.weight"),
        ("something else", "decoder.weight"),
    ],
)
def test_other_architectures_are_named(name: str, key: str, tmp_path: Path) -> None:
    save_file({key: torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=f"is not a DRCT model: it seems to be .*{name}"):
        load_drct(tmp_path / "other.safetensors")


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm-was-done"),))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"params": Harmful()}, "harmful.pth")
    Path("empty.pth").touch()
    Path("empty.safetensors").touch()
    Path("text.pth").write_text("these are no weights")
    Path("text.safetensors").write_text("these are no weights")
    whole = official()
    torch.save(whole, "whole.pth")
    Path("truncated.pth").write_bytes(Path("whole.pth").read_bytes()[:-2000])
    torch.save([1, 2, 3], "list.pth")
    torch.save({"params": {"a": 1}}, "numbers.pth")
    Path("folder.pth").mkdir()
    for name in ("harmful", "empty", "text", "truncated", "list", "numbers", "folder", "missing"):
        with pytest.raises(ModelError, match=f"{name}.pth") as seen:
            load_drct(f"{name}.pth")
        assert str(seen.value).endswith(".") and "\n" not in str(seen.value)
    for name in ("empty", "text", "missing"):
        with pytest.raises(ModelError, match=f"{name}.safetensors"):
            load_drct(f"{name}.safetensors")
    assert not Path("harm-was-done").exists()


def test_sizes_that_the_model_cannot_take() -> None:
    model = Drct(SMALL)
    with pytest.raises(ModelError, match="multiples of 4"):
        model(torch.rand(1, 3, 8, 10))
    with pytest.raises(ModelError, match="shape"):
        model(torch.rand(1, 1, 8, 8))
    with pytest.raises(ModelError, match="heads"):
        DrctConfig(heads=(7, 4, 2, 6, 4))
    with pytest.raises(ModelError, match="one of 2, 3, 4, 8"):
        DrctConfig.of(5)


def test_batched_equals_single() -> None:
    model = Drct(SMALL).eval()
    pictures = torch.rand(3, 3, 12, 20)
    with torch.no_grad():
        together = model(pictures)
        apart = torch.cat([model(picture[None]) for picture in pictures])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-6)
