"""Weight files from anywhere: whatever is in them, a model comes out or an error in one sentence, and quickly."""

import io
import json
import random
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_safetensors

from redline.errors import ModelError
from redline.files.weights import read_weights
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.models.lsd import Lsd, LsdConfig, load_lsd, save_lsd
from redline.upscale.network import load_network

MUTANTS = 60
TINY = DrctConfig.of(2, 1, width=8, growth=4, features=4, window=2)


def saved(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def without_warnings(make: Callable[[], Any]) -> Any:
    """Torch warns of what few use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.zeros(1).expand(10**12), r"has the shape \(1000000000000,\) but only 4 bytes of values"),
        (torch.zeros(9)[:4].as_strided((10**6, 5), (0, 1)), "but only 36 bytes of values"),
        (torch.empty(10**12, device="meta"), "is a tensor on the device 'meta'"),
        (torch.eye(3).to_sparse(), "is a sparse_coo tensor; only dense"),
        (without_warnings(lambda: torch.eye(3).to_sparse_csr()), "is a sparse_csr tensor; only dense"),
        (without_warnings(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "is a nested tensor"),
        (
            without_warnings(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
            "has the unsupported dtype qint8",
        ),
        (torch.zeros(3, dtype=torch.complex64), "has the unsupported dtype complex64"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "has the unsupported dtype float8_e4m3fn"),
    ],
)
def test_tensors_that_are_no_weights(tensor: torch.Tensor, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.pth"
    path.write_bytes(without_warnings(lambda: saved({"conv_first.weight": tensor})))
    torch.set_warn_always(True)  # some warnings come once in a process
    try:
        with warnings.catch_warnings(record=True) as warned, pytest.raises(ModelError, match=sentence) as seen:
            warnings.simplefilter("always")
            load_network(path)
    finally:
        torch.set_warn_always(False)
    assert [str(warning.message) for warning in warned] == []
    assert "'conv_first.weight'" in str(seen.value) and str(path) in str(seen.value)


def test_many_tensors_that_share_one_memory(tmp_path: Path) -> None:
    values = torch.zeros(100_000)
    (tmp_path / "tied.pth").write_bytes(saved({"a": values, "b": values}))
    assert len(read_weights(tmp_path / "tied.pth")) == 2
    (tmp_path / "hostile.pth").write_bytes(saved({str(index): values for index in range(1000)}))
    with pytest.raises(ModelError, match="bytes, but its tensors would take 400,000,000"):
        read_weights(tmp_path / "hostile.pth")


def test_parameters_and_capital_letters(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(saved({"a": torch.nn.Parameter(torch.ones(2)), 7: torch.ones(1)}))
    (tmp_path / "b.SAFETENSORS").write_bytes(to_safetensors({"a": torch.ones(2)}))
    for name in ("a.pth", "b.SAFETENSORS"):
        weights = read_weights(tmp_path / name)
        assert list(weights) == ["a"] and not weights["a"].requires_grad


def header_only(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"{" + b" " * 17_000_000 + b"}", "has a header of 17,000,002 bytes; at most 16,777,216 are read"),
        (
            json.dumps(
                {str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(40_000)}
            ).encode(),
            "lists more than 32,768 tensors",
        ),
    ],
)
@pytest.mark.parametrize("load", [read_weights, load_lsd])
def test_large_headers_are_refused_at_once(
    header: bytes, sentence: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(header_only(header))
    began_s = time.process_time()
    with pytest.raises(ModelError, match=sentence):
        load(path)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"blocks": 10**9}, "but only [0-9]+ weights"),
        ({"width": 8 * 10**17}, "are too large"),
        ({"multipliers": [1, 10**30]}, "multipliers = .* is not a finite 64-bit number"),
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
    ],
)
def test_lsd_headers_with_impossible_sizes_raise(config: Any, sentence: str, tmp_path: Path) -> None:
    own = LsdConfig(patch=2, width=8, multipliers=(1, 2))
    claimed = config if isinstance(config, str) else json.dumps({**own.to_dict(), **config})
    tensors = {name: tensor.contiguous() for name, tensor in Lsd(own).state_dict().items()}
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(to_safetensors(tensors, metadata={"architecture": "lsd", "config": claimed}))
    with pytest.raises(ModelError, match=sentence):
        load_lsd(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {f"layers.{group}.adjust5.weight": torch.ones(8, 24, 1, 1) for group in range(70)},
            "groups = 70 must be a whole number .at least 1 and at most 64.",
        ),
        ({"conv_first.weight": torch.zeros(10**9, 0, 3, 3)}, r"'conv_first.weight' has the shape \(1000000000, 0, 3"),
        (
            {"layers.0.swin1.attn.relative_position_bias_table": torch.zeros(40_000, 1)},
            "window = 100 must be a whole number",
        ),
    ],
)
def test_a_drct_of_impossible_sizes(change: dict[str, torch.Tensor], sentence: str, tmp_path: Path) -> None:
    save_drct(Drct(TINY), tmp_path / "whole.safetensors")
    weights = read_weights(tmp_path / "whole.safetensors")
    (tmp_path / "hostile.pth").write_bytes(saved({**weights, **change}))
    with pytest.raises(ModelError, match=sentence):
        load_network(tmp_path / "hostile.pth")


def mutated(data: bytes, structure: int, chance: random.Random) -> bytes:
    """A few bytes changed, removed or added, most of them where the file says what is in it."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(min(structure, len(changed)) if chance.random() < 0.8 else len(changed))
        match chance.randrange(4):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                changed[place] ^= 1 << chance.randrange(8)
            case 2:
                del changed[place : place + chance.randint(1, 8)]
            case _:
                changed[place:place] = chance.randbytes(chance.randint(1, 8))
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["drct.pth", "legacy.pth", "drct.safetensors", "lsd.safetensors"])
def test_mutated_files_end_in_one_sentence(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / kind
    if kind == "lsd.safetensors":
        save_lsd(Lsd(LsdConfig(patch=2, width=8, multipliers=(1, 2))), path)
    else:
        save_drct(Drct(TINY), tmp_path / "drct.safetensors")
        if path.suffix == ".pth":
            weights = read_weights(tmp_path / "drct.safetensors")
            path.write_bytes(saved({"params": weights}, _use_new_zipfile_serialization=kind == "drct.pth"))
    whole, chance = path.read_bytes(), random.Random(7)
    load: Callable[[Path], Any] = load_lsd if kind == "lsd.safetensors" else load_network
    load(path)
    refused = 0
    for _ in range(MUTANTS):
        path.unlink()  # a mapped file must not change under its tensors
        path.write_bytes(mutated(whole, 8000, chance))
        try:
            load(path)
        except ModelError as error:
            refused += 1
            assert str(error).endswith(".") and "\n" not in str(error)
    assert refused > MUTANTS // 2


def with_other_tensors(weights: dict[str, torch.Tensor], chance: random.Random) -> dict[str, Any]:
    """Some weights of another type, shape, layout or name."""
    changed: dict[str, Any] = dict(weights)
    for name in chance.sample(sorted(weights), chance.randint(1, 3)):
        tensor = weights[name]
        match chance.randrange(8):
            case 0:
                changed[name] = tensor.to(chance.choice([torch.complex64, torch.bool, torch.int64, torch.float64]))
            case 1:
                changed[name] = tensor.flatten()
            case 2:
                changed[name] = tensor[(0,) * chance.randint(1, tensor.ndim)]
            case 3:
                changed[name] = tensor.new_empty((chance.choice([0, 1, 3, 2**40]), 0, *tensor.shape[1:]))
            case 4:
                changed[name] = tensor.T if tensor.ndim == 2 else tensor[None]
            case 5:
                changed[name] = chance.choice([tensor.to_sparse(), tensor.to("meta"), tensor[:1].expand_as(tensor)])
            case 6:
                changed[chance.choice(["", "layers.x", "layers.1.adjust5.weight", "upsample.9.weight"])] = tensor
            case _:
                changed[name] = chance.choice([None, 7, "text", [tensor], {"weight": tensor}])
    return changed


@pytest.mark.filterwarnings("ignore")
def test_mutated_tensors_end_in_one_sentence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_drct(Drct(TINY), tmp_path / "whole.safetensors")
    weights, chance = read_weights(tmp_path / "whole.safetensors"), random.Random(7)
    refused = 0
    for number in range(MUTANTS):
        path = tmp_path / f"{number}.pth"
        path.write_bytes(saved(with_other_tensors(weights, chance)))
        try:
            load_network(path)
        except ModelError as error:
            refused += 1
            assert str(error).endswith(".") and "\n" not in str(error)
    assert refused > MUTANTS // 2
