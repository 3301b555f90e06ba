"""Training on recall tasks: fresh samples by seed and step, no text, and a folder that says which task it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.evaluation.recall import Mqar, Passkey, task_in
from redline.models.memory.neural_memory import NeuralMemory
from redline.training.text.config import TextTraining
from redline.training.text.recall_task import RecallTask
from redline.training.text.run import prepare_training, run_text
from redline.training.text.tokenizer import byte_tokenizer
from redline.training.text.workload import make_workload

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "src" / "redline" / "training" / "configs"
SETTINGS = """
[model]
kind = "memory"
width = 16
layers = 2
heads = 2
attention_every = 2
segment = 8
[data]
recall = "mqar"
symbols = 20
pairs = 3
questions = 4
length = 29
batch = 5
validation_rows = 7
[training]
steps = 4
learning_rate = 0.01
warmup_steps = 2
precision = "fp32"
log_every = 1
validate_every = 2
"""
PASSKEY = ('recall = "mqar"\nsymbols = 20\npairs = 3\nquestions = 4\nlength = 29', 'recall = "word"\nlength = 120')


@pytest.fixture
def recall(tmp_path: Path) -> Callable[..., Path]:
    def write(*exchanges: tuple[str, str]) -> Path:
        text = SETTINGS
        for old, new in exchanges:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "recall.toml"
        path.write_text(text)
        return path

    return write


def prepare(path: Path, out: Path, resume: bool = False, **options: object) -> RecallTask:
    task = prepare_training(path, out, CPU, resume, lambda _: None, lambda _: None, **options)
    assert isinstance(task, RecallTask)
    return task


def losses(path: Path, out: Path, resume: bool = False, **options: object) -> list[float]:
    seen: list[float] = []
    run_text(prepare(path, out, resume, **options), out, CPU, resume, lambda now: seen.append(now.loss), lambda _: None)
    return seen


def test_the_settings_make_the_task(recall: Callable[..., Path]) -> None:
    training = TextTraining.read(recall())
    assert training.recall == Mqar(20, 3, 4) and training.tokenizer.vocabulary == 20
    assert TextTraining.read(recall(PASSKEY)).recall == Passkey("word")
    assert TextTraining.read(recall(PASSKEY, ("length = 120", "length = 120\nanswer_bytes = 4"))).recall == Passkey(
        "word", 4
    )


def test_batches_are_fresh_and_follow_from_seed_and_step(recall: Callable[..., Path], tmp_path: Path) -> None:
    one, again = (prepare(recall(), tmp_path / "out") for _ in range(2))
    other = prepare(recall(("steps = 4", "steps = 4\nseed = 1")), tmp_path / "out")
    steps = [one._draw(step).tokens_BS for step in range(4)]
    assert all(not torch.equal(a, b) for n, a in enumerate(steps) for b in steps[:n])
    assert torch.equal(again._draw(3).tokens_BS, steps[3])
    assert not torch.equal(other._draw(3).tokens_BS, steps[3])
    assert one._draw(0).targets == 5 * 4 and one.items_per_step == 5 * 29 and one.padding_share is None
    judged = one._sample(1, 0, 5, 29).tokens_BS
    assert all(not torch.equal(judged, step) for step in steps)


def test_a_resumed_training_equals_an_uninterrupted_one(recall: Callable[..., Path], tmp_path: Path) -> None:
    whole = losses(recall(), tmp_path / "whole", steps=4)
    # The schedule follows the steps, so it must stand still for both halves to be comparable.
    flat = ("warmup_steps = 2", "warmup_steps = 0\nfinal_share = 1.0")
    whole = losses(recall(flat), tmp_path / "flat", steps=4)
    first = losses(recall(flat), tmp_path / "half", steps=2)
    assert first + losses(recall(flat), tmp_path / "half", True, steps=4) == whole
    with pytest.raises(RedlineError, match="recall"):
        losses(recall(flat, ("pairs = 3", "pairs = 4")), tmp_path / "half", True, steps=6)


def test_the_folder_says_which_task_and_text_has_a_tokenizer(recall: Callable[..., Path], tmp_path: Path) -> None:
    _, result = run_text(prepare(recall(), tmp_path / "a"), tmp_path / "a", CPU, False, lambda _: None, lambda _: None)
    assert result is not None and 0 <= result.figures["recall"] <= 1 and result.padding_share is None
    config = json.loads((result.model / "config.json").read_text())
    assert task_in(config) == Mqar(20, 3, 4) and "eos_token_id" not in config
    assert not (result.model / "tokenizer.json").exists()
    page = result.page.read_text()
    assert "the final recall is" in page and "&#34;mqar&#34;" in page and "padding avoided" not in page
    losses(recall(PASSKEY), tmp_path / "b", steps=1)
    config = json.loads((tmp_path / "b" / "model" / "config.json").read_text())
    assert task_in(config) == Passkey("word") and config["memory"]["vocabulary"] == 256
    assert (tmp_path / "b" / "model" / "tokenizer.json").exists()


def test_the_loss_is_that_of_the_answers_and_goes_down(recall: Callable[..., Path], tmp_path: Path) -> None:
    path = recall(("pairs = 3", "pairs = 1"), ("steps = 4", "steps = 60"), ("width = 16", "width = 32"))
    seen = losses(path, tmp_path / "out")
    # Ten values to guess among once it has learnt what is asked for.
    assert seen[0] > 2.6 and min(seen[-5:]) < 2.4


def test_byte_tokens_are_their_bytes() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer())
    text = "The  magic\n\tnumber é 🙂 \x00\x7f"
    assert tokenizer.encode(text).ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


def test_it_can_be_climbed(recall: Callable[..., Path]) -> None:
    workload = make_workload(TextTraining.read(recall()))
    batch = workload.inputs(0)
    assert batch["tokens_BS"].shape == (5, 29)
    assert torch.isfinite(workload.build()(**batch))


@pytest.mark.parametrize("name", [file.stem for file in sorted(CONFIGS.glob("recall-*.toml"))])
def test_bundled_configs_are_valid(name: str) -> None:
    training = TextTraining.read(CONFIGS / f"{name}.toml")
    assert training.recall is not None
    with torch.device("meta"):
        model = training.model.build(training.model.vocabulary_for(training.recall.vocabulary))
    parameters = sum(weight.numel() for weight in model.parameters())
    assert 18e6 < parameters < 23e6 if "20m" in name else parameters < 1e5
    training.recall.sample(torch.Generator().manual_seed(0), 1, training.data.length)


def test_the_control_of_passkeys_is_of_the_same_size_and_training_without_memory() -> None:
    memory, window = (TextTraining.read(CONFIGS / f"recall-passkey-20m{name}.toml") for name in ("", "-window"))
    assert (memory.data, memory.loop, memory.recall) == (window.data, window.loop, window.recall)
    with torch.device("meta"):
        models = [training.model.build(256) for training in (memory, window)]
    remembering, seeing = (sum(weight.numel() for weight in model.parameters()) for model in models)
    assert remembering <= seeing < 1.01 * remembering
    assert any(isinstance(module, NeuralMemory) for module in models[0].modules())
    assert not any(isinstance(module, NeuralMemory) for module in models[1].modules())
    assert models[1].config.memory_slots == 0 and models[1].config.span == models[0].config.span


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (('recall = "mqar"', 'recall = "uuid"'), "unknown recall task 'uuid'"),
        (('recall = "mqar"', "recall = 3"), "recall = 3 under .* must be a string"),
        (("pairs = 3", "pairs = 9.5"), "pairs = 9.5 of the recall task mqar must be a whole number"),
        (("pairs = 3", "pairs = 30"), "not enough for 30 pairs"),
        (("pairs = 3", "keys = 3"), "unknown key 'keys' under \\[data\\]: the recall task mqar has symbols, pairs"),
        (("batch = 5", 'batch = 5\nsources = ["a"]'), "recall and sources under \\[data\\] exclude"),
        (
            ("[training]", "[tokenizer]\nvocabulary = 300\n[training]"),
            "recall under \\[data\\] excludes \\[tokenizer\\]",
        ),
        (("length = 29", "length = 9"), "3 pairs and 4 questions need 10 tokens, not 9"),
        (("width = 16", "width = 16\nvocabulary = 12"), "the vocabularies do not match"),
    ],
)
def test_contradictions_are_refused_and_nothing_is_written(
    recall: Callable[..., Path], tmp_path: Path, exchange: tuple[str, str], said: str
) -> None:
    with pytest.raises(RedlineError, match=said):
        prepare(recall(exchange), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_on_the_command_line_contradicts_a_task(recall: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="a recall task reads no text"):
        prepare(recall(), tmp_path / "out", sources=["text"])
