"""`redline eval talk`: a table, JSON and wrong answers from a chat model's folder, and a sentence for bad input."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redline.models.decoder import Decoder, DecoderConfig, save_decoder
from redline.training.text.chat_format import TEMPLATE
from talk_tokenizer import small_talk_tokenizer

from .conftest import Seen
from .test_bad_input import assert_one_sentence


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("redline.generation.talk_evaluation._MAX_TOKENS", 4)
    torch.manual_seed(0)
    tokenizer, folder = small_talk_tokenizer(), tmp_path / "chatty"
    save_decoder(Decoder(DecoderConfig(320, 16, 1, 1, 24, context=2048)), folder, stop_tokens=(tokenizer.end,))
    (folder / "tokenizer.json").write_text(tokenizer.to_text())
    (folder / "tokenizer_config.json").write_text(tokenizer.config_text(TEMPLATE))
    return folder


def test_a_table_and_json(model: Path, command: Callable[..., Seen]) -> None:
    options = ("--topic", "facts", "--topic", "memory", "--samples", 3, "--device", "cpu", "--wrong", 1)
    seen = command("eval", "talk", model, *options)
    lines = seen.out.splitlines()
    assert seen.code == 0 and lines[0].split() == ["topic", "right", "control", "asked"]
    assert [line.split() for line in lines[1:4]] == [
        [name, "0.0%", "0.0%", asked] for name, asked in (("facts", "3"), ("memory", "3"), ("all", "6"))
    ]
    assert "user: " in seen.out and "expected: " in seen.out and "answered:" in seen.out
    found = command("eval", "talk", model, *options, "--json").json()
    assert found["model"] == "chatty" and found["is_meaningful"] is True
    assert [row["topic"] for row in found["topics"]] == ["facts", "memory", "all"] and len(found["wrong"]) == 1
    assert found["wrong"][0]["messages"][-1]["role"] == "user"


def test_a_control_that_is_right_gives_another_exit_code(
    model: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.evaluation.talk.evaluate.is_same", lambda answer, expected: True)
    seen = command("eval", "talk", model, "--topic", "facts", "--samples", 2, "--device", "cpu")
    assert seen.code == 1 and "this evaluation is meaningless" in seen.out


def test_bad_input_is_one_sentence(model: Path, command: Callable[..., Seen]) -> None:
    assert_one_sentence(command("eval", "talk", model, "--topic", "weather"), "unknown topic 'weather'")
    assert_one_sentence(command("eval", "talk", model, "--samples", 1), "samples must be at least 2")
    (model / "tokenizer_config.json").unlink()
    assert_one_sentence(command("eval", "talk", model), "has no chat template")
