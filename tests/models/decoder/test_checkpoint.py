"""Weights go both ways between Redline and transformers, and what does not fit exactly is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderConfig, load_decoder, save_decoder

from .conftest import VARIANTS

Saved = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_are_those_of_transformers(variant: str, saved: Saved) -> None:
    folder, oracle = saved(variant)
    tokens = torch.randint(89, (2, 131))
    with torch.no_grad():
        expected = oracle(tokens).logits
        found = load_decoder(folder)(tokens)
    assert (found - expected).abs().max() < 1e-4 and expected.abs().mean() > 0.1


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_what_is_saved_is_what_transformers_loads(variant: str, shard_bytes: int, saved: Saved, tmp_path: Path) -> None:
    import transformers

    folder, oracle = saved(variant)
    save_decoder(load_decoder(folder), tmp_path / "ours", stop_tokens=(3,), shard_bytes=shard_bytes)
    files = list((tmp_path / "ours").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(89, (1, 40))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, oracle(tokens).logits)
    assert again.config.eos_token_id == 3
    # And ours reads its own the same.
    first, second = load_decoder(folder).state_dict(), load_decoder(tmp_path / "ours").state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_sharded_files_and_their_index(saved: Saved) -> None:
    folder, oracle = saved("qwen2", shard="50KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokens = torch.randint(89, (1, 20))
    with torch.no_grad():
        assert torch.allclose(load_decoder(folder)(tokens), oracle(tokens).logits, atol=1e-4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].popitem()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="disagree: only one of them has"):
        load_decoder(folder)
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match="No such file"):
        load_decoder(folder)


def test_the_dtype_is_the_files_or_the_one_asked_for(saved: Saved) -> None:
    folder, oracle = saved("llama3")
    oracle.to(torch.bfloat16).save_pretrained(folder)
    model = load_decoder(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # Angles stay exact whatever the weights are.
    assert model.tables.cos.dtype == torch.float32
    assert {p.dtype for p in load_decoder(folder, torch.float32).parameters()} == {torch.float32}
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "unsupported model_type 'gpt2'"),
        ({"model_type": ["llama"]}, "unsupported model_type \\['llama'\\]"),
        ({"head_dim": 8.0}, "invalid value: 'head_dim' is 8.0"),
        ({"num_key_value_heads": 2.0}, "invalid value: 'num_key_value_heads' is 2.0"),
        ({"sliding_window": 2.5}, "invalid value: 'sliding_window' is 2.5"),
        ({"num_attention_heads": 0}, "num_attention_heads must be 1 or more, not 0"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be 1 to 10,000, not 100,000,000"),
        ({"rms_norm_eps": float("nan")}, "invalid value: 'rms_norm_eps' is nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "'rope_theta' is inf"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' .supported: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "and they disagree; remove one"),
        ({"sliding_window": 8}, "a sliding window, which llama does not have"),
        ({"num_key_value_heads": 4}, "heads .6. must be a multiple of key_value_heads .4."),
        ({"hidden_size": "48"}, "invalid value: 'hidden_size' is '48'"),
        ({"intermediate_size": 80}, "9 weights have another shape"),
        ({"num_hidden_layers": 4}, "9 weights are missing"),
        ({"num_hidden_layers": 2}, "9 weights are unexpected"),
        ({"attention_bias": True}, "12 weights are missing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_do_not_fit_are_named(change: dict[str, Any], words: str, saved: Saved) -> None:
    folder, _ = saved("llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=words) as error:
        load_decoder(folder)
    assert str(error.value).endswith(".") and str(error.value).count(". ") == 0


def test_damaged_files(saved: Saved) -> None:
    folder, _ = saved("llama3")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="'model.norm.weight' has values that are not finite"):
        load_decoder(folder)
    weights["model.norm.weight"][3] = 1
    # An old file of a tied model holds the embedding twice; another head is a contradiction.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    load_decoder(folder)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="differs from the embedding"):
        load_decoder(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"only as pytorch_model.bin, .* convert it to safetensors with `python -c"):
        load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_decoder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot read .*config.json"):
        load_decoder(folder)


def test_a_decoder_without_a_matching_family_is_not_saved(tmp_path: Path) -> None:
    config = DecoderConfig(50, 16, 2, 2, 24, windows=(4, None))
    with pytest.raises(ModelError, match="no Hugging Face architecture"):
        save_decoder(Decoder(config), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
