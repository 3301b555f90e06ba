"""A memory model's folder: what is damaged, or does not fit its config.json exactly, is one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderConfig, load_decoder, save_decoder
from redline.models.memory import TitanConfig, TitanModel, load_memory_model, save_memory_model

TINY = TitanConfig(vocabulary=31, width=24, layers=4, heads=4, attention_every=2, segment=8, memory_slots=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_memory_model(TitanModel(TINY), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, tied_embeddings=False, memory_slots=0, key_value_heads=2, convolution=2),
        replace(TINY, attention_every=3, memory_update="titans", memory_heads=3, mlp_width=40),
        replace(TINY, attention_every=0, memory_key_dim=5, memory_value_dim=7),
    ],
)
def test_what_is_saved_is_what_is_loaded(config: TitanConfig, tmp_path: Path) -> None:
    model = TitanModel(config).eval()
    save_memory_model(model, tmp_path)
    tokens = torch.randint(config.vocabulary, (2, 40))
    with torch.no_grad():
        assert torch.equal(load_memory_model(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["blocks.1.mixer.score.bias"][0] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is damaged: 'blocks.1.mixer.score.bias' has values that are not finite[.]$"):
        load_memory_model(folder)


def test_weights_beyond_the_dtype_asked_for_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][3] = 1e5
    save_file(weights, folder / "model.safetensors")
    assert load_memory_model(folder).norm.weight[3] == 1e5
    with pytest.raises(ModelError, match="'norm.weight' in .* has values that are too large for float16[.]$"):
        load_memory_model(folder, torch.float16)


def test_weights_of_whole_numbers_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.long() for name, weight in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="are stored as I64: quantized files are unsupported[.]$"):
        load_memory_model(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 10**8}, "do not fit its config.json: it has 100000000 layers, but there are only 48 weights[.]$"),
        ({"layers": 5}, "13 weights are missing .blocks.4.mixer_norm.weight …."),
        ({"layers": 3}, "10 weights are unexpected .blocks.3"),
        ({"memory_slots": 0}, "4 weights are unexpected .blocks.1.mixer.score.bias …."),
        (
            {"vocabulary": 10**30},
            "vocabulary = 10*…? in the config .* is not a finite 64-bit number[.]$",
        ),
        ({"mlp_width": 10**18}, "config.json. has sizes that are too large for any model[.]$"),
        ({"convolution": 10**12}, "4 weights have another shape .blocks.0.mixer.convolution is"),
        (
            {"segment": 10**12},
            "must be at most 1048576 tokens, not 2000000000000[.]$",
        ),
        ({"window_segments": 10**12}, "must be at most 1048576 tokens, not 8000000000008"),
        (
            {"memory_slots": 10**11},
            "memory_slots = 100000000000 in .* .at least 0 and at most 1,048,576.[.]$",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_the_weights_do_not_have_are_refused_before_anything_is_built(
    folder: Path, change: dict[str, Any], sentence: str
) -> None:
    path = folder / "config.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "memory": {**found["memory"], **change}}))
    with pytest.raises(ModelError, match=sentence) as error:
        load_memory_model(folder).new_state()
    assert str(error.value).endswith(".") and str(error.value).count(". ") == 0


def test_folders_of_other_models_raise(folder: Path) -> None:
    for text, sentence in (
        ("{}", "is not the config of a Titans model[.]$"),
        ("[]", "config.json' is not a JSON object[.]$"),
        ("{", "config.json' is not a readable model file: it is not JSON .*[.]$"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=sentence):
            load_memory_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot read .*config.json': No such file or directory[.]$"):
        load_memory_model(folder)


def test_models_of_both_kinds_are_loaded_without_gradients(folder: Path, tmp_path: Path) -> None:
    save_decoder(Decoder(DecoderConfig(31, 16, 1, 2, 24)), tmp_path / "decoder")
    for model in (load_memory_model(folder), load_decoder(tmp_path / "decoder")):
        assert not model.training and not any(weight.requires_grad for weight in model.parameters())
