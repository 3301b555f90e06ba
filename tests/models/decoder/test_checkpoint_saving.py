"""A model saved over another: at any moment the folder holds one of the two or none, and at the end nothing else."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from redline.errors import ModelError
from redline.files.atomic import CannotWrite
from redline.models.decoder import Decoder, DecoderConfig, load_decoder, save_decoder
from redline.models.memory import TitanConfig, TitanModel, load_memory_model, save_memory_model

SMALL = DecoderConfig(vocabulary=50, width=16, layers=3, heads=2, mlp_width=24)
TITAN = TitanConfig(vocabulary=50, width=16, layers=2, heads=2, segment=8)
SHARD = 6000


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Killed(BaseException):
    pass


def killed_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends before the file of this number gets its name."""
    replace, done = os.replace, []

    def replaced(*paths: Path) -> None:
        if len(done) == moment:
            raise Killed
        done.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", replaced)


@pytest.mark.parametrize("kind", ["decoder", "memory"])
def test_a_save_that_is_killed_leaves_no_mixture(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(model: torch.nn.Module) -> None:
        if isinstance(model, TitanModel):
            save_memory_model(model, tmp_path)
        else:
            assert isinstance(model, Decoder)
            save_decoder(model, tmp_path, shard_bytes=SHARD)

    old, new = (Decoder(SMALL) if kind == "decoder" else TitanModel(TITAN) for _ in range(2))
    load = load_decoder if kind == "decoder" else load_memory_model
    kept, lost = 0, 0
    for moment in range(100):
        save(old)
        with monkeypatch.context() as patch:
            killed_at(moment, patch)
            try:
                save(new)
            except Killed:
                pass
            else:
                break
        try:
            assert same(load(tmp_path), old)
            kept += 1
        except ModelError as error:
            assert "config.json" in str(error)
            lost += 1
    assert same(load(tmp_path), new)
    # All files are written before the first takes the place of an old one.
    assert kept >= lost > 0


def test_files_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    model = Decoder(SMALL)
    save_decoder(model, tmp_path)
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    assert same(load_decoder(tmp_path), model)
    save_decoder(model, tmp_path)
    assert names(tmp_path) == ["config.json", "model.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_of_an_earlier_model_go_and_others_stay(tmp_path: Path) -> None:
    model, titan = Decoder(SMALL), TitanModel(TITAN)
    save_decoder(model, tmp_path, shard_bytes=SHARD)
    many = names(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_decoder(model, tmp_path, shard_bytes=2 * SHARD)
    fewer = names(tmp_path)
    assert 4 < len(fewer) < len(many) + 1
    assert sum(name.endswith(f"-of-{len(fewer) - 3:05d}.safetensors") for name in fewer) == len(fewer) - 3
    save_memory_model(titan, tmp_path)
    assert names(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert same(load_memory_model(tmp_path), titan)
    save_decoder(model, tmp_path, shard_bytes=SHARD)
    assert names(tmp_path) == sorted([*many, "tokenizer.json"])
    assert same(load_decoder(tmp_path), model)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    for save in (
        lambda: save_decoder(Decoder(SMALL), tmp_path),
        lambda: save_memory_model(TitanModel(TITAN), tmp_path),
    ):
        with pytest.raises(CannotWrite, match="cannot write .*model.safetensors.*[.]$"):
            save()


def test_values_beyond_the_dtype_asked_for_are_refused(tmp_path: Path) -> None:
    model = Decoder(SMALL)
    with torch.no_grad():
        model.norm.weight[3] = 1e5
    save_decoder(model, tmp_path)
    assert load_decoder(tmp_path).norm.weight[3] == 1e5
    sentence = "'model.norm.weight' in .*model.safetensors' has values that are too large for float16[.]$"
    with pytest.raises(ModelError, match=sentence):
        load_decoder(tmp_path, torch.float16)
    # The file's own dtype is no safeguard either: it is that of most weights.
    weights = load_file(tmp_path / "model.safetensors")
    mixed = {name: one if name == "model.norm.weight" else one.half() for name, one in weights.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=sentence):
        load_decoder(tmp_path)
