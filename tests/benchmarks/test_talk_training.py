"""Training a chat model in pieces: a piece continues the one before it, and the last one becomes the bundled model."""

import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmark_scripts import load_script
from redline.errors import RedlineError
from redline.generation.text_generator import TextGenerator
from talk_tokenizer import small_talk_tokenizer

SETTINGS = """
[model]
width = 32
layers = 2
heads = 2
mlp_width = 48
context = 2048
[data]
conversations = true
length = 96
batch = 2
validation_rows = 13
[tokenizer]
file = "{tokenizer}"
[training]
steps = 8
learning_rate = 0.01
warmup_steps = 2
precision = "fp32"
ema_decay = 0.5
log_every = 1
validate_every = 50
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talk")
    (folder / "tokenizer.json").write_text(small_talk_tokenizer(320).to_text())
    (folder / "talk.toml").write_text(SETTINGS.format(tokenizer=folder / "tokenizer.json"))
    return folder / "talk.toml"


def call(script: ModuleType, *arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["script", *map(str, arguments)])
        return script.main()


def test_two_pieces_are_one_training_and_become_a_model(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("talk_training")
    monkeypatch.setattr(script, "PART_BYTES", 100_000)

    def piece(name: str, *arguments: object) -> dict[str, Any]:
        assert call(script, config, "--out", tmp_path / name, "--device", "cpu", *arguments) == 0
        return json.loads(capsys.readouterr().out)

    whole = piece("whole")
    assert whole["finished"] and whole["step"] == whole["steps_in_piece"] == 8 and whole["tokens"] == 8 * 2 * 96

    class Stopping:
        def __call__(self, seen: Any) -> None:
            if seen.step == 5:
                signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(script, "Lines", Stopping)
        first = piece("first")
    assert not first["finished"] and first["step"] == 5 and "right" in first
    parts = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert len(parts) > 2 and parts[-1] == "result.json"
    second = piece("second", "--state", tmp_path / "first")
    assert second["finished"] and second["step"] == 8 and second["steps_in_piece"] == 3
    folders = [tmp_path / "unpacked" / name for name in ("whole", "second")]
    for folder in folders:
        script.unpack(tmp_path / folder.name, folder)
    # The moments were rounded to bf16 once, the model to fp16 at the end.
    theirs, ours = (load_file(folder / "model/model.safetensors") for folder in folders)
    for name, weight in theirs.items():
        assert str(weight.dtype) == "torch.float16" and (weight.float() - ours[name].float()).abs().max() < 2e-3

    bundle, into = load_script("bundle_talk"), tmp_path / "bundled" / "talk-test"
    monkeypatch.setattr(bundle, "SAID", bundle.SAID[1:3])
    monkeypatch.setattr(bundle, "ANSWER_TOKENS", 4)
    monkeypatch.setattr("redline.generation.talk_evaluation._MAX_TOKENS", 3)
    assert call(bundle, tmp_path / "second", "--into", into, "--samples", 2) == 0
    card, scores = (into / "README.md").read_text(), json.loads((into / "scores.json").read_text())
    assert "| arithmetic | 0.0% | 0.0% | 2 |" in card and "> **user**: Who are you?" in card
    assert scores["training"]["step"] == 8 and scores["topics"][-1]["topic"] == "all"
    assert TextGenerator(into, device="cpu").folder.stop_tokens
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 1000)
    assert call(bundle, tmp_path / "second", "--into", tmp_path / "large", "--samples", 2) == 2
    assert "more than 1,000" in capsys.readouterr().err and not (tmp_path / "large").exists()


def test_what_cannot_be_continued_is_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("talk_training")
    (tmp_path / "state").mkdir()
    arguments = (config, "--out", tmp_path / "out", "--device", "cpu", "--state", tmp_path / "state")
    assert call(script, *arguments) == 2 and "has no piece.tar.000" in capsys.readouterr().err
    (tmp_path / "state/piece.tar.000").write_bytes(b"damaged")
    with pytest.raises(RedlineError, match="no complete archive"):
        script.unpack(tmp_path / "state", tmp_path / "unpacked")
