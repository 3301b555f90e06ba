"""`redline generate`: text as it comes, its speed as JSON, and a sentence for everything that cannot be."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import PATIENCE_S
from redline.generation import InferenceEngine

from ..generation.tiny_language_model import write_model
from .conftest import Seen
from .test_bad_input import assert_one_sentence

PROMPT = "the sea is 🙂"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_text_is_the_models(folder: Path, command: Callable[..., Seen]) -> None:
    from redline.generation.folder import ModelFolder
    from redline.models.decoder import load_decoder

    tokenizer = ModelFolder.open(folder).tokenizer
    prompt = tokenizer.encode(PROMPT).ids
    (completion,) = InferenceEngine(load_decoder(folder)).generate([prompt], max_tokens=40)
    whole = tokenizer.decode([*prompt, *completion.tokens]).removeprefix(PROMPT)
    seen = command("generate", folder, PROMPT, "--max-tokens", 40, "--device", "cpu")
    assert seen.code == 0
    assert seen.out.replace("\ufffd", "") == whole.replace("\ufffd", "") + "\n"
    figures = command("generate", folder, PROMPT, "--max-tokens", 40, "--device", "cpu", "--json").json()
    assert figures["text"] == seen.out[:-1]
    assert (figures["tokens"], figures["prompt_tokens"]) == (40, len(prompt))
    assert figures["ended_by"] == "length" and figures["plan"] == "eager" and figures["device"] == "cpu"
    assert figures["prefill_ms"] > 0 and figures["tokens_per_s"] > 1
    assert 0 < figures["token_ms_p50"] <= figures["token_ms_p95"]


def test_a_seed_gives_its_text_again(folder: Path, command: Callable[..., Seen]) -> None:
    def text(*options: object) -> str:
        return command("generate", folder, PROMPT, "--max-tokens", 30, "--device", "cpu", *options).out

    warm = ("--temperature", 1.5, "--top-p", 0.95)
    assert text(*warm, "--seed", 4) == text(*warm, "--seed", 4) != text(*warm, "--seed", 5)


def test_the_prompt_may_come_from_stdin(
    folder: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = command("generate", folder, PROMPT, "--max-tokens", 5, "--device", "cpu").out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode()), encoding="latin-1"))
    assert command("generate", folder, "-", "--max-tokens", 5, "--device", "cpu").out == given
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfa"), encoding="utf-8"))
    assert_one_sentence(command("generate", folder, "-"), "stdin is not UTF-8")


def test_a_plan_and_a_single_token(folder: Path, command: Callable[..., Seen]) -> None:
    options = ("--max-tokens", 1, "--device", "cpu", "--json", "--plan", "fused_ops + int8(min_features=16)")
    figures = command("generate", folder, PROMPT, *options).json()
    assert figures["plan"] == "fused_ops + int8(min_features=16)" and figures["tokens"] == 1
    assert figures["tokens_per_s"] is None


def test_what_cannot_be_done(folder: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path / "absent", "a"), "there is no folder"),
        ((folder, "the sea " * 100), "tokens, and the model's context is 200"),
        ((folder, "a", "--temperature", "-1"), "the temperature is 0 or more"),
        ((folder, "a", "--precision", "fp4"), "there is no precision 'fp4'"),
        ((folder, "a", "--plan", "warp"), "unknown rung 'warp'"),
        ((folder, "a", "--max-tokens", "0"), "at least 1 token"),
    ):
        assert_one_sentence(command("generate", *arguments, "--device", "cpu"), words)
    (folder / "tokenizer.json").rename(tmp_path / "aside.json")
    assert_one_sentence(command("generate", folder, "a"), "has no tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert_one_sentence(command("generate", folder, "a"), "architecture 'mamba'")


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    write_model(folder, context=9000)
    arguments = [sys.executable, "-m", "redline", "generate", str(folder), "sea", "--max-tokens", "8000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    process = subprocess.Popen([*arguments, "--device", "cpu"], cwd=tmp_path, **pipes)
    try:
        assert process.stdout is not None
        first = process.stdout.read(1)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in err and b"interrupted" in err
    assert (first + out).endswith(b"\n")
    (first + out).decode("utf-8")
