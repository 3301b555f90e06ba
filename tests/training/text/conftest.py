"""A little text, and settings for a model small enough to be trained in a test."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

SENTENCE = "the memory of a machine is what it does not forget and what it never learnt cannot be lost again"
WORDS = SENTENCE.split()
SETTINGS = """
[model]
kind = "decoder"
width = 16
layers = 3
heads = 2
mlp_width = 24
context = 40
[data]
sources = ["{text}"]
length = 29
batch = 3
validation = 0.1
validation_rows = 9
shards = "{shards}"
[tokenizer]
vocabulary = 280
[training]
steps = 8
learning_rate = 0.01
warmup_steps = 2
precision = "fp32"
log_every = 1
validate_every = 4
checkpoint_minutes = 10
"""


def write_text_files(folder: Path, documents: int = 60, seed: int = 3) -> None:
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 50))) for _ in range(documents)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """`config(("batch = 3", "batch = 6"))` writes the settings with some lines exchanged."""
    write_text_files(tmp_path / "text")

    def write(*exchanges: tuple[str, str], name: str = "tiny.toml") -> Path:
        text = SETTINGS.format(text=tmp_path / "text", shards=tmp_path / "shards")
        for old, new in exchanges:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
