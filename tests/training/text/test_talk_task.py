"""Training on conversations: it learns answers, resumes bit for bit, and saves a folder that can chat."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.datasets.conversations import ASKED
from redline.errors import RedlineError
from redline.generation.text_generator import TextGenerator
from redline.training.bundled import CONFIGS
from redline.training.loop import Progress
from redline.training.text.config import TextTraining
from redline.training.text.packing import NO_TARGET
from redline.training.text.run import prepare_training, run_text
from redline.training.text.talk_task import TalkTask
from talk_tokenizer import small_talk_tokenizer

CPU = torch.device("cpu")
SETTINGS = """
[model]
width = 32
layers = 2
heads = 2
mlp_width = 48
context = 256
[data]
conversations = true
length = 96
batch = 4
validation_rows = 26
[tokenizer]
file = "{tokenizer}"
[training]
steps = 12
learning_rate = 0.02
warmup_steps = 2
precision = "fp32"
log_every = 1
validate_every = 20
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(small_talk_tokenizer(320).to_text())
    return path


@pytest.fixture
def talk(tmp_path: Path, tokenizer: Path) -> Callable[..., Path]:
    def write(*exchanges: tuple[str, str]) -> Path:
        text = SETTINGS.format(tokenizer=tokenizer)
        for old, new in exchanges:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "talk.toml"
        path.write_text(text)
        return path

    return write


def run(path: Path, out: Path, resume: bool = False, progress: Callable[[Progress], Any] = lambda now: None) -> Any:
    task = prepare_training(path, out, CPU, resume, lambda _: None, lambda _: None)
    assert isinstance(task, TalkTask)
    return run_text(task, out, CPU, resume, progress, lambda _: None)


def test_a_step_lowers_the_loss_of_answers_only(talk: Callable[..., Path], tmp_path: Path) -> None:
    task = prepare_training(talk(), tmp_path / "out", CPU, False, lambda _: None, lambda _: None)
    batch = task._draw(0)
    asked = batch.tokens_BS[:, 1:].where(batch.targets_BS[:, :-1] == NO_TARGET, NO_TARGET)
    answers = batch.targets_BS[:, :-1]

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            logits = task.model(batch.tokens_BS, batch.packing)[:, :-1].flatten(0, 1)
        return tuple(float(torch.nn.functional.cross_entropy(logits, t.flatten())) for t in (answers, asked))

    before = losses()
    with torch.no_grad():
        logits = task.model(batch.tokens_BS, batch.packing).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batch.targets_BS.flatten())
        torch.testing.assert_close(task.loss(0), expected, rtol=1e-4, atol=1e-5)
    optimizer = task.optimizer()
    for _ in range(8):
        task.loss(0).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = losses()
    assert after[0] < 0.8 * before[0]
    # What only the user says is not learned; common letters of both are.
    assert before[0] - after[0] > 1.5 * (before[1] - after[1])
    task.close()


def test_a_stopped_training_resumes_bit_for_bit_and_can_chat(talk: Callable[..., Path], tmp_path: Path) -> None:
    path = talk()
    whole, _ = run(path, tmp_path / "whole")

    def stop(now: Progress) -> None:
        if now.step == 5:
            signal.raise_signal(signal.SIGTERM)

    assert run(path, tmp_path / "pieces", progress=stop)[0].interrupted
    resumed, result = run(path, tmp_path / "pieces", resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    assert resumed.loss == whole.loss and set(resumed.figures) == {"validation_loss", "right"}
    generator = TextGenerator(result.model, device="cpu")
    text = generator.chat([{"role": "user", "content": "Hello"}], max_tokens=5)
    assert len(text.tokens) <= 5 and "<|" not in text
    assert generator.folder.stop_tokens == (generator.tokenizer.token_to_id("<|end|>"),)
    about = json.loads((result.model / "tokenizer_config.json").read_text())
    assert "generation" in about["chat_template"] and about["split_special_tokens"] is False


def test_conversations_of_another_program_are_refused(
    talk: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(talk(("steps = 12", "steps = 3")), tmp_path / "out")
    monkeypatch.setattr("redline.training.text.talk_task.conversation", lambda draw: [])
    with pytest.raises(RedlineError, match="belongs to another training run: its text is conversations"):
        run(talk(), tmp_path / "out", resume=True)


def test_contradictions_in_the_config_are_refused(talk: Callable[..., Path]) -> None:
    for old, new, said in (
        ("conversations = true", 'conversations = true\nsources = ["a"]', "conversations and sources under"),
        ("conversations = true", 'conversations = true\nrecall = "mqar"', "conversations and recall under"),
        ("conversations = true", "workers = 2", "workers under .data. write conversations"),
        ("[training]", "split_digits = true\n[training]", "split_digits under .tokenizer. is for a tokenizer to train"),
    ):
        with pytest.raises(RedlineError, match=said):
            TextTraining.read(talk((old, new)))


def test_the_bundled_configs_fit_their_purpose() -> None:
    small = TextTraining.read(CONFIGS / "talk-small.toml")
    size = small.model.parameters(small.model.vocabulary_for(small.tokenizer.vocabulary))
    # 8 MB in fp16, with 400 kB for the tokenizer.
    assert 3_400_000 < size < 3_800_000 and small.data.length == 1024
    assert small.data.validation_rows % len(ASKED) == 0
    tiny = TextTraining.read(CONFIGS / "talk-tiny.toml")
    assert tiny.data.conversations and tiny.tokenizer.split_digits and tiny.data.workers == 0
