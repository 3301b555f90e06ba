"""A model's folder: what it says of itself, and what is missing."""

import json
from pathlib import Path

import pytest
import torch

from redline.errors import ModelError
from redline.generation.folder import ModelFolder, read_tokenizer

from .tiny_language_model import byte_tokenizer, write_model


def test_it_knows_its_model_its_tokens_and_where_texts_end(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    folder = ModelFolder.open(tmp_path)
    assert folder.stop_tokens == () and folder.tokenizer.encode("sea").ids[0] == 0
    loaded = folder.load(torch.float32, torch.device("cpu"))
    assert torch.equal(loaded(torch.tensor([[5, 6]])), model(torch.tensor([[5, 6]])))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 9]}')
    assert ModelFolder.open(tmp_path).stop_tokens == (4, 9)
    (tmp_path / "generation_config.json").unlink()
    assert ModelFolder.open(tmp_path).stop_tokens == (1,)


def test_a_prompt_is_neither_cut_nor_filled(tmp_path: Path) -> None:
    """Files keep what their training cut and filled its texts with."""
    write_model(tmp_path)
    tokenizer = byte_tokenizer()
    whole = tokenizer.encode("the sea is the land").ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ModelFolder.open(tmp_path).tokenizer.encode("the sea is the land").ids == whole


@pytest.mark.parametrize("are_letters", [None, False, True])
def test_names_of_special_tokens_follow_split_special_tokens(are_letters: bool | None, tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if are_letters is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"split_special_tokens": are_letters}))
    found = read_tokenizer(tmp_path).encode("sea<|end|>", add_special_tokens=False).ids
    assert (tokenizer.token_to_id("<|end|>") in found) != bool(are_letters)


def test_a_tokenizer_has_no_more_tokens_than_its_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = byte_tokenizer().get_vocab_size()
    for larger in (tokens, tokens + 40):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": larger}))
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": tokens - 1}))
    with pytest.raises(ModelError, match=f"has {tokens:,} tokens, and its model's vocabulary is {tokens - 1:,}"):
        ModelFolder.open(tmp_path)
    memory = {"model_type": "redline_memory", "memory": {"vocabulary": tokens - 2}}
    (tmp_path / "config.json").write_text(json.dumps(memory))
    with pytest.raises(ModelError, match=f"vocabulary is {tokens - 2:,}"):
        ModelFolder.open(tmp_path)
    # What was added for padding is in no prompt.
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": tokens}))
    padded = byte_tokenizer()
    assert padded.add_special_tokens(["[PAD]"]) == 1
    padded.save(str(tmp_path / "tokenizer.json"))
    ModelFolder.open(tmp_path)


def test_the_folder_of_a_training_says_where_its_model_is(tmp_path: Path) -> None:
    write_model(tmp_path / "run" / "model")
    with pytest.raises(
        ModelError, match="run' is the output folder of a training run: use the model in '.*run/model'[.]$"
    ):
        ModelFolder.open(tmp_path / "run")
    assert ModelFolder.open(tmp_path / "run" / "model").model_type == "llama"


def test_it_knows_how_many_tokens_its_tokenizer_has(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = byte_tokenizer()
    assert ModelFolder.open(tmp_path).tokens == tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ModelFolder.open(tmp_path).tokens == tokenizer.get_vocab_size()


def test_missing_files_raise(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        ModelFolder.open(tmp_path / "absent")
    with pytest.raises(ModelError, match="is not a model folder: it has no config.json"):
        ModelFolder.open(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelError, match=r"holds an adapter \(LoRA\), not a model"):
        ModelFolder.open(tmp_path)
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(ModelError, match="unknown architecture 'gpt_neox'"):
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(ModelError, match="eos_token_id that is not a token id"):
        ModelFolder.open(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a readable tokenizer"):
        ModelFolder.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        ModelFolder.open(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        ModelError, match=r"has no tokenizer\.json .*, only tokenizer\.model: convert it with `python -c"
    ):
        ModelFolder.open(tmp_path)
    # Weights come first: who has none needs no tokenizer yet.
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only as pytorch_model\.bin"):
        ModelFolder.open(tmp_path)
