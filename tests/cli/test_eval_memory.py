"""`redline eval memory`: a table, JSON and a page from a model's folder, and a sentence for what cannot be asked."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redline.cli import live_line
from redline.evaluation.recall import Mqar, describe
from redline.models.memory import TitanConfig, TitanModel, save_memory_model
from redline.training.text.tokenizer import byte_tokenizer

from ..generation.tiny_language_model import write_model
from .conftest import Seen
from .test_bad_input import assert_one_sentence


def write_memory_model(folder: Path, vocabulary: int, about: dict[str, object] | None = None) -> Path:
    torch.manual_seed(0)
    config = TitanConfig(vocabulary, 16, 2, 2, segment=8, attention_every=2, memory_slots=4)
    save_memory_model(TitanModel(config), folder, about)
    return folder


@pytest.fixture
def symbolic(tmp_path: Path) -> Path:
    return write_memory_model(tmp_path / "pairs" / "model", 20, {"recall": describe(Mqar(20, 3, 4))})


@pytest.fixture
def textual(tmp_path: Path) -> Path:
    folder = write_memory_model(tmp_path / "bytes", 256)
    (folder / "tokenizer.json").write_text(byte_tokenizer())
    return folder


def test_a_model_trained_on_symbols_is_evaluated_on_its_task(symbolic: Path, command: Callable[..., Seen]) -> None:
    options = ("--lengths", "80,40", "--samples", 3, "--device", "cpu")
    seen = command("eval", "memory", symbolic, *options)
    lines = seen.out.splitlines()
    assert seen.code == 0 and lines[0].split() == ["task", "tokens", "right", "asked", "held", "took"]
    assert [line.split()[:2] for line in lines[1:]] == [["mqar", "40"], ["mqar", "80"]]
    rows = command("eval", "memory", symbolic, *options, "--json").json()["recall"]
    assert [(row["task"], row["length"], row["asked"]) for row in rows] == [("mqar", 40, 12), ("mqar", 80, 12)]
    assert all(0 <= row["accuracy"] <= 1 and row["seconds"] > 0 for row in rows)
    assert rows[0]["state_bytes"] == rows[1]["state_bytes"] > 0


def test_an_unwritable_page_raises_first_and_keeps_the_result(
    symbolic: Path, tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    options = ("--lengths", "40", "--samples", 3, "--device", "cpu", "--page")
    for page, said in ((tmp_path / "file" / "page.html", "is not a folder"), (tmp_path, "it is a folder")):
        seen = command("eval", "memory", symbolic, *options, page)
        assert_one_sentence(seen, said)
        assert seen.out == ""
    # Whoever takes the folder away meanwhile has the result.
    monkeypatch.setattr("redline.cli.eval.check_can_write_file", lambda _: None)
    seen = command("eval", "memory", symbolic, *options, tmp_path / "file" / "page.html")
    assert seen.code == 2 and seen.out.splitlines()[1].split()[:2] == ["mqar", "40"] and "cannot write" in seen.err


def test_progress_lines_without_a_terminal(
    symbolic: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--lengths", "40,80", "--samples", 3, "--batch", 2, "--device", "cpu")
    assert "mqar at" not in command("eval", "memory", symbolic, *options).err
    monkeypatch.setattr(live_line, "LINE_EVERY_S", 0.0)
    said = [line for line in command("eval", "memory", symbolic, *options).err.splitlines() if "mqar at" in line]
    # What comes while a step takes long repeats the last one.
    assert [line for line in said if not line.endswith(" so far)")] == [
        f"mqar at {length} tokens: {done} of 3" for length in (40, 80) for done in (0, 2)
    ]


def test_text_tasks_work_with_any_tokenizer(textual: Path, tmp_path: Path, command: Callable[..., Seen]) -> None:
    (tmp_path / "book.txt").write_text("It was the best of times. " * 40, encoding="utf-8")
    options = ("--lengths", "150,260", "--samples", 2, "--device", "cpu", "--text", tmp_path / "book.txt")
    seen = command("eval", "memory", textual, *options, "--page", "memory.html", "--json").json()
    assert {row["task"] for row in seen["recall"]} == {"passkey", "number", "word"} and len(seen["recall"]) == 6
    assert [row["last"] for row in seen["loss"]] == [64, 128, 256, 260]
    assert all(3 < row["loss"] < 9 for row in seen["loss"])
    page = (tmp_path / "memory.html").read_text()
    assert (
        page.count("<svg") == 9
        and "<script" not in page
        and "http" not in page.replace("http-equiv", "").replace("http-equiv", "")
    )
    assert "At 260 tokens it recalls" in page and "Loss by position" in page and str(tmp_path) not in page
    table = command("eval", "memory", textual, *options, "--task", "word").out
    assert "129–256" in table and "passkey" not in table


def test_a_decoder_is_evaluated_up_to_its_context(tmp_path: Path, command: Callable[..., Seen]) -> None:
    write_model(tmp_path / "decoder", context=200)
    seen = command("eval", "memory", tmp_path / "decoder", "--task", "passkey", "--samples", 2, "--device", "cpu")
    assert seen.code == 0 and "context is 200 tokens" in seen.err and "200" in seen.out
    lengths = ("--lengths", "120,300", "--lengths", 999, "--lengths", 190)
    seen = command("eval", "memory", tmp_path / "decoder", *lengths, "--samples", 2, "--device", "cpu", "--json")
    assert "skipped lengths beyond the model's context of 200 tokens: 300, 999" in seen.err
    rows = seen.json()
    assert {row["length"] for row in rows["recall"]} == {120, 190}
    held = [row["state_bytes"] for row in rows["recall"] if row["task"] == "passkey"]
    assert held[1] > held[0]


def test_a_trained_model_can_be_evaluated_and_generate(tmp_path: Path, command: Callable[..., Seen]) -> None:
    (tmp_path / "tiny.toml").write_text(
        '[model]\nkind = "memory"\nwidth = 16\nlayers = 2\nheads = 2\nsegment = 16\n[data]\nrecall = "passkey"\n'
        'length = 130\nbatch = 2\nvalidation_rows = 2\n[training]\nsteps = 2\nwarmup_steps = 1\nprecision = "fp32"\n'
    )
    assert command("train", tmp_path / "tiny.toml", "--out", "out", "--device", "cpu").code == 0
    seen = command("eval", "memory", "out/model", "--lengths", 140, "--samples", 2, "--device", "cpu", "--json").json()
    assert [row["task"] for row in seen["recall"]] == ["passkey"]
    text = command("generate", "out/model", "What is", "--max-tokens", 5, "--device", "cpu", "--json").json()
    assert text["prompt_tokens"] == 7 and text["tokens"] == 5


def test_bad_input(symbolic: Path, textual: Path, tmp_path: Path, command: Callable[..., Seen]) -> None:
    write_model(tmp_path / "decoder", context=200)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    nothing = write_memory_model(tmp_path / "nothing", 20)
    write_memory_model(tmp_path / "run" / "model", 20)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "short.txt").write_text("a")
    for arguments, said in [
        (("missing",), "there is no folder 'missing'"),
        ((tmp_path / "odd",), "unknown architecture 'mamba'"),
        ((nothing,), "trained on no recall task"),
        ((tmp_path / "run",), "is the output folder of a training run: use the model in"),
        ((symbolic, "--task", "needle"), "was not trained on needle"),
        ((symbolic, "--task", "word"), "the task word needs a tokenizer"),
        ((symbolic, "--task", "uuid"), "unknown recall task 'uuid'"),
        ((symbolic, "--text", tmp_path / "latin.txt"), "no tokenizer.json"),
        ((symbolic, "--lengths", "1k"), "lengths must be whole numbers"),
        ((symbolic, "--lengths", "4"), "need 10 tokens, not 4"),
        ((symbolic, "--lengths", "40", "--samples", 0), "samples must be at least 1"),
        ((symbolic, "--lengths", "40", "--batch", "-3"), "batch must be at least 1, not -3"),
        ((symbolic, "--lengths", "40", "--batch", "0"), "batch must be at least 1, not 0"),
        ((symbolic, "--lengths", "40", "--seed", 10**23), "seed must be a whole number"),
        ((symbolic, "--precision", "int8"), "unknown precision 'int8'"),
        ((textual, "--text", tmp_path / "gone.txt"), "cannot read"),
        ((textual, "--text", tmp_path / "latin.txt"), "not UTF-8"),
        ((textual, "--lengths", "130", "--samples", 1, "--text", tmp_path / "short.txt"), "fewer than 2 tokens"),
        (
            (tmp_path / "decoder", "--lengths", "300,400"),
            "no length fits into the model's context of 200 tokens: 300, 400.",
        ),
        ((tmp_path / "decoder", "--lengths", "150,400", "--seed", "-1"), "seed must be a whole number"),
        ((tmp_path / "decoder", "--lengths", "3,400"), "tokens, not 3"),
    ]:
        seen = command("eval", "memory", *arguments, "--device", "cpu", "--page", "p.html")
        assert_one_sentence(seen, said)
        assert "skipped" not in seen.err
        assert not (tmp_path / "p.html").exists()


def test_the_loss_of_a_text_alone(textual: Path, tmp_path: Path, command: Callable[..., Seen]) -> None:
    """At lengths that no question fits in."""
    (tmp_path / "text.txt").write_text("words and words again " * 40)
    options = ("--task", "none", "--lengths", "16,32", "--device", "cpu")
    seen = command(
        "eval", "memory", textual, *options, "--text", tmp_path / "text.txt", "--page", tmp_path / "page.html"
    )
    assert seen.code == 0 and seen.out.strip().startswith("tokens before") and "wrote " in seen.err
    assert "loss" in (tmp_path / "page.html").read_text()
    assert_one_sentence(command("eval", "memory", textual, *options), "nothing to evaluate: give a task")
