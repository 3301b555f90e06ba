"""A model's folder: what it says of itself, and what is missing."""

import json
from pathlib import Path

import pytest
import torch

from redline.errors import ModelError
from redline.generation.folder import ModelFolder

from .tiny_language_model import write_model


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


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        ModelFolder.open(tmp_path / "absent")
    with pytest.raises(ModelError, match="cannot read .*config.json"):
        ModelFolder.open(tmp_path)
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(ModelError, match="architecture 'gpt_neox', which is not known"):
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(ModelError, match="'eos_token_id' that is no token"):
        ModelFolder.open(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a readable tokenizer"):
        ModelFolder.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        ModelFolder.open(tmp_path)
