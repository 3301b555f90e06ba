"""`redline train CONFIG.toml`: from text to a model, killed and resumed, and one sentence for whatever cannot be."""

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import redline.cli
from redline.machine.machine import Machine
from redline.training.journal import read_journal
from redline.training.loop import Progress
from redline.training.text.tokenizer import byte_tokenizer

from .conftest import Seen
from .test_bad_input import assert_one_sentence

SENTENCE = "the memory of a machine is what it does not forget and what it never learnt cannot be lost again"
WORDS = SENTENCE.split()
SETTINGS = """
[model]
width = 16
layers = 2
heads = 2
mlp_width = 24
context = 40
[data]
sources = ["text"]
length = 24
batch = 2
validation = 0.1
shards = "shards"
[tokenizer]
vocabulary = 270
[training]
steps = 6
learning_rate = 0.01
warmup_steps = 2
ema_decay = 0.9
precision = "fp32"
log_every = 1
validate_every = 3
"""
# No matrix of it is one between features.
NARROW = SETTINGS.replace("16", "4").replace("24\ncontext", "4\ncontext") + 'optimizer = "muon"\n'
# With a tokenizer that is there, nothing is read before the shards are begun.
LOADED = """
sources = ["bad.jsonl"]
length = 24
shards = "a/b"
[tokenizer]
file = "bytes.json"
end = "a"
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Seen]:
    """As the other commands' tests have it, but without workers, which training does not use."""

    def run(*arguments: object) -> Seen:
        monkeypatch.setattr(sys, "argv", ["redline", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            redline.cli.main()
        seen = capfd.readouterr()
        return Seen(int(end.value.code or 0), seen.out, seen.err)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in, with text and settings, on a machine whose ceilings are known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "text" / "cache"))
    known = Machine.detect("cpu").cache_path
    known.parent.mkdir(parents=True)
    rates = {"fp32": 1e12, "bf16": 1e12, "fp16": 1e12}
    known.write_text(json.dumps({"bytes_per_s": 1e11, "matmul_flops_per_s": rates, "convolution_flops_per_s": rates}))
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 50))) for _ in range(40)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "tiny.toml").write_text(SETTINGS)
    return tmp_path


def change(here: Path, old: str, new: str) -> None:
    assert old in SETTINGS, old
    (here / "tiny.toml").write_text(SETTINGS.replace(old, new))


def train(command: Callable[..., Seen], *arguments: str) -> Seen:
    return command("train", "tiny.toml", "--device", "cpu", *arguments)


def test_from_text_to_a_model_and_a_page(command: Callable[..., Seen], here: Path) -> None:
    seen = train(command, "--json")
    assert seen.code == 0, seen.err
    said = seen.json()
    assert said["steps"] == 6 and said["tokens"] == 6 * 48 and said["figures"]["validation_loss"] > 0
    assert 0 < said["padding_share"] < 1 and said["skipped"] == 0 and said["tokens_per_s"] > 0
    folder = here / "redline-out" / "train" / "tiny"
    assert {file.name for file in folder.iterdir()} >= {"checkpoints", "journal.jsonl", "model", "summary.html"}
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (folder / "model").iterdir()}
    for words in ("tokens/s", "MFU", "left", "validation_loss", "padding would waste", "precision fp32", "AdamW of"):
        assert words in seen.err, words
    page = (folder / "summary.html").read_text()
    assert "parameters</h1>" in page and "<svg" in page and str(here) not in page
    again = train(command)
    assert again.code == 2 and "already holds a training run" in again.err


def test_the_model_can_be_read_back(command: Callable[..., Seen], here: Path) -> None:
    import torch

    from redline.models.decoder import load_decoder
    from redline.training.checkpoints import read_checkpoint
    from redline.training.text.tokenizer import load_tokenizer

    assert train(command, "--out", "x", "--steps", "2").code == 0
    model = load_decoder(here / "x" / "model")
    assert load_tokenizer(here / "x" / "model" / "tokenizer.json").vocabulary <= model.config.vocabulary
    saved = read_checkpoint(here / "x" / "checkpoints" / "step-000000002.pt")
    assert torch.equal(model.embedding.weight, saved["ema"]["embedding.weight"])


def start(here: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "redline", "train", "tiny.toml", "--device", "cpu", *arguments]
    return subprocess.Popen(words, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def losses(folder: Path) -> dict[int, float | None]:
    return {e.step: e.metrics["loss"] for e in read_journal(folder / "journal.jsonl") if "loss" in e.metrics}


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(command: Callable[..., Seen], here: Path) -> None:
    """A real process, killed without warning wherever it happens to be; then resumed until it is through."""
    change(here, "steps = 6", "steps = 25\ncheckpoint_minutes = 0")
    child = start(here, "--out", "parts")
    journal = here / "parts" / "journal.jsonl"
    until = random.randint(2, 18)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if journal.exists() and len(losses(here / "parts")) >= until:
            time.sleep(random.random() * 0.05)
            break
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL and list((here / "parts" / "checkpoints").glob("step-*.pt"))
    reached = max(losses(here / "parts"))
    assert reached < 25
    assert train(command, "--out", "parts", "--resume").code == 0
    assert train(command, "--out", "whole").code == 0
    assert losses(here / "parts") == losses(here / "whole") and len(losses(here / "whole")) == 25
    assert len(list((here / "parts" / "checkpoints").iterdir())) == 2
    a, b = (here / name / "model" / "model.safetensors" for name in ("whole", "parts"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("width = 16", "widht = 16", "unknown key 'widht' under [model] (did you mean width?)"),
        ("steps = 6", "steps = 6\nminutes = 2", "either steps or minutes"),
        ("vocabulary = 270", 'vocabulary = 270\nfile = "a.json"', "exclude each other"),
        ("width = 16", "width = 16\nvocabulary = 260", "the vocabularies do not match"),
        ("length = 24", "length = 99", "rows of 99 tokens are longer than the model's limit of 40"),
        ('sources = ["text"]', 'sources = ["absent"]', "there is no file or folder 'absent'"),
        ('sources = ["text"]', 'sources = ["empty.txt"]', "the corpus is empty: 'empty.txt' holds no text"),
        ('precision = "fp32"', 'precision = "fp8"', "cannot be used here"),
        ("vocabulary = 270", 'file = "absent.json"', "there is no tokenizer 'absent.json'"),
        ('sources = ["text"]', 'sources = ["short.txt"]', "tokens do not fill one row of 24"),
        ('sources = ["text"]', 'sources = ["same.jsonl"]', "too few documents differ"),
        (
            SETTINGS.partition("[data]")[2].partition("[training]")[0],
            LOADED,
            "line 2 of 'bad.jsonl' cannot be read: it is not JSON",
        ),
        ("width = 16", "width = 16\nqkv_bias = true\nquery_key_norm = true", "no Hugging Face architecture has"),
        (
            "width = 16",
            "width = 16\nwindow = -4",
            "window = -4 under [model] must be a whole number (at least 0)",
        ),
        (SETTINGS, NARROW, "muon updates hidden matrices, and this model has none"),
        ("steps = 6", 'steps = 6\nplan = "warp"', "unknown rung 'warp'"),
        ("steps = 6", 'steps = 6\nplan = "tf32"', "tf32 in the plan cannot be used here"),
        ("steps = 6", 'steps = 6\nplan = "compile(regional=true)"', "no list of modules has 3 of one class"),
    ],
    ids=lambda value: str(value).split("\n")[-1][:24],
)
def test_impossible_configs_print_one_error(
    command: Callable[..., Seen], here: Path, old: str, new: str, words: str
) -> None:
    (here / "empty.txt").write_text(" \n")
    (here / "short.txt").write_text("all of it")
    (here / "same.jsonl").write_text('{"text": "again and again and again"}\n' * 9)
    (here / "bad.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    (here / "bytes.json").write_text(byte_tokenizer())
    change(here, old, new)
    before = {path.name for path in here.iterdir()}
    seen = train(command, "--out", "x")
    assert (seen.code, seen.out) == (2, ""), seen.err
    (line,) = [line for line in seen.err.splitlines() if line.startswith("redline:")]
    assert words in line and line.endswith(".") and "Traceback" not in seen.err
    assert {path.name for path in here.iterdir()} == before


def test_a_truncated_shard_and_another_models_checkpoint(command: Callable[..., Seen], here: Path) -> None:
    assert train(command, "--out", "x", "--steps", "1").code == 0
    journal = (here / "x" / "journal.jsonl").read_bytes()
    change(here, "width = 16", "width = 32")
    other = train(command, "--out", "x", "--resume")
    assert other.code == 2 and "belongs to another training run: its width is 16, not 32." in " ".join(
        other.err.split()
    )
    absent = train(command, "--out", "y", "--resume")
    assert absent.code == 2 and "no checkpoint in 'y/checkpoints' to resume from." in absent.err
    (shard,) = (here / "shards").rglob("*.bin")
    shard.write_bytes(shard.read_bytes()[:-9])
    cut = train(command, "--out", "y")
    assert cut.code == 2 and "is truncated" in cut.err
    assert (here / "x" / "journal.jsonl").read_bytes() == journal and not (here / "y").exists()


def test_sigterm_saves_and_ends_with_its_own_exit_code(
    command: Callable[..., Seen], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("redline.cli.train")
    monkeypatch.setattr(module.TrainingLine, "__call__", lambda *_: signal.raise_signal(signal.SIGTERM))
    stopped = train(command, "--out", "x")
    assert stopped.code == 143 and "redline: terminated." in stopped.err and "continue with: redline" in stopped.err
    assert list((here / "x" / "checkpoints").iterdir()) != []


def test_ctrl_c_saves_and_says_how_to_go_on(
    command: Callable[..., Seen], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("redline.cli.train")
    line = module.TrainingLine

    class Interrupting(line):
        def __call__(self, seen: Progress) -> None:
            super().__call__(seen)
            if seen.step == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "TrainingLine", Interrupting)
    change(here, 'sources = ["text"]', "")
    usual = ("--source", "text", "--source", "a text/b.txt", "--steps", "7")
    (here / "a text").mkdir()
    (here / "a text" / "b.txt").write_text(SENTENCE)
    stopped = train(command, *usual, "--out", "x")
    again = stopped.err.partition("continue with: ")[2].splitlines()[0]
    given = "--source text --source 'a text/b.txt' --steps 7 --device cpu"
    assert stopped.code == 130 and "redline: interrupted." in stopped.err
    assert again == f"redline train tiny.toml {given} --out x --resume"
    assert not (here / "x" / "model").exists()
    monkeypatch.setattr(module, "TrainingLine", line)
    seen = command(*shlex.split(again)[1:], "--json")
    assert seen.code == 0 and seen.json()["steps"] == 7
    assert train(command, *usual, "--out", "whole").code == 0 and losses(here / "x") == losses(here / "whole")


def test_one_file_is_split_by_position(command: Callable[..., Seen], here: Path) -> None:
    (here / "one.txt").write_text(" ".join(random.Random(4).choices(WORDS, k=700)))
    seen = train(command, "--source", "one.txt", "--out", "x", "--json")
    assert seen.code == 0 and seen.json()["figures"]["validation_loss"] > 0, seen.err
    assert "one document" in seen.err and "its last" in seen.err and "held out for validation" in seen.err
    assert train(command, "--source", "one.txt", "--out", "x", "--steps", "8", "--resume").code == 0


def test_the_word_text_may_be_written(command: Callable[..., Seen], here: Path) -> None:
    assert command("train", "text", "tiny.toml", "--device", "cpu", "--steps", "1", "--out", "x").code == 0
    seen = command("train", "absent")
    assert seen.code == 2 and "there is no config 'absent'" in seen.err and "decoder-tiny" in seen.err


@pytest.mark.filterwarnings("default")
def test_emulated_dtypes_print_warnings(
    command: Callable[..., Seen], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CPU that lists fp16 and has no fast products in it."""
    known = Machine.detect("cpu").cache_path
    rates = {"fp32": 1e12, "bf16": 1e9, "fp16": 1e9}
    known.write_text(json.dumps({"bytes_per_s": 1e11, "matmul_flops_per_s": rates, "convolution_flops_per_s": rates}))
    real = Machine.detect

    def listing(device: str = "auto") -> Machine:
        return replace(real(device), hardware_dtypes=("fp32", "bf16", "fp16"))

    monkeypatch.setattr(Machine, "detect", listing)
    change(here, 'precision = "fp32"', 'precision = "fp16"\noptimizer = "muon"')
    seen = train(command, "--steps", "2", "--out", "x")
    said = " ".join(seen.err.split())
    assert seen.code == 0 and "training in fp32." in said and "precision fp32" in said
    assert "emulates fp16 in matrix products: measured at 0.1% of the fp32 rate" in said
    assert "muon always computes in bf16" in said and "adamw is faster here" in said
    assert "Warning" not in said and ".py:" not in said and "frame #" not in said
    change(here, 'precision = "fp32"', 'precision = "fp16"')
    assert "muon" not in train(command, "--steps", "2", "--out", "y").err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decoder-tiny",), "no text to train on: give files or folders with --source"),
        (
            ("decoder-tiny", "--steps", 3, "--time", "1m"),
            "steps and time (--steps, --time) both set the duration: give one",
        ),
        (("drct", "drct-small-x4", "--steps", 3, "--time", "1m"), "steps and time (--steps, --time) both set"),
        (("lsd", "lsd-tiny", "--steps", 3, "--time", "1m"), "steps and time (--steps, --time) both set"),
    ],
)
def test_options_that_are_missing_or_contradict_each_other_are_named(
    arguments: tuple[object, ...], words: str, command: Callable[..., Seen], tmp_path: Path
) -> None:
    assert_one_sentence(command("train", *arguments, "--device", "cpu"), words)
    assert list(tmp_path.iterdir()) == []
