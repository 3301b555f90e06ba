"""`redline.train`: a config, its source and callbacks in; weights, figures and messages out."""

import doctest
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import redline
from redline.errors import RedlineError
from redline.training import run
from redline.training.loop import Progress
from synthetic_photos import save_synthetic_photos

TEXT: dict[str, Any] = {
    "model": {"width": 16, "layers": 2, "heads": 2, "mlp_width": 24, "context": 32},
    "data": {"length": 16, "batch": 2, "validation": 0.1, "shards": "tokens"},
    "tokenizer": {"vocabulary": 270},
    "training": {"warmup_steps": 2, "log_every": 1, "precision": "fp32"},
}
PHOTOS: dict[str, Any] = {
    "model": {"scale": 2, "groups": 1, "width": 8, "growth": 4, "features": 6, "window": 4},
    "data": {"crop_px": 8, "batch": 2},
    "training": {"precision": "fp32", "log_every": 1},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ["the", "memory", "of", "a", "machine", "is", "what", "it", "does", "not", "forget"]
    (tmp_path / "corpus.txt").write_text(" ".join(random.Random(4).choices(words, k=700)))
    return tmp_path


def test_docstring_examples(here: Path) -> None:
    results = doctest.testmod(run)
    assert results.attempted and not results.failed


def test_a_text_training_reports_resumes_and_generates(here: Path) -> None:
    seen: list[Progress] = []
    logged: list[str] = []
    options: dict[str, Any] = {"source": here / "corpus.txt", "out": "run", "device": "cpu", "log": logged.append}

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    stopped = redline.train(TEXT, **options, steps=5, progress=interrupt)
    assert stopped.interrupted and stopped.steps == 3 and stopped.stop_signal == signal.SIGINT
    assert stopped.output is None and stopped.loss == seen[-1].loss
    with pytest.raises(RedlineError, match="already holds a training run: resume it"):
        redline.train(TEXT, **options, steps=5)
    result = redline.train(TEXT, **options, steps=5, resume=True)
    assert not result.interrupted and (result.steps, result.unit, result.folder) == (5, "token", Path("run"))
    assert result.items_per_s and result.figures["validation_loss"] > 0
    assert any("one document" in line for line in logged)
    generator = redline.TextGenerator(result.model, device="cpu")
    assert len(generator("the memory", max_tokens=4).tokens) <= 4


def test_a_photo_training(here: Path) -> None:
    save_synthetic_photos(here / "photos", 2, 48, 53, seed=1)
    save_synthetic_photos(here / "test", 1, 37, 42, seed=2)
    result = redline.train(PHOTOS, "photos", validation="test", steps=2, device="cpu")
    assert result.folder == Path("redline-out/train/drct") and result.unit == "image"
    assert result.model.is_file() and result.output.scores["test"].mean.psnr_y_db > 0


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (TEXT, {"steps": 1, "time": "1m"}, "steps and time .--steps, --time. both set the duration"),
        (TEXT, {"steps": 1, "start": "x"}, "validation and start are for image models"),
        (PHOTOS, {"steps": 1, "source": ["a", "b"]}, "source must be one folder of photos .* not 2"),
        ({**PHOTOS, "stages": {}}, {"steps": 1, "start": "x"}, "start is for super-resolution models"),
        ({**TEXT, "modle": {}}, {"steps": 1}, r"unknown table \[modle\] \(did you mean model"),
        ("decoder-tini", {}, "there is no config 'decoder-tini'"),
        ("decoder-tiny", {"kind": "lsd"}, "the config 'decoder-tiny' is for a language model, not for a live video"),
    ],
)
def test_impossible_arguments_raise(here: Path, config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RedlineError, match=message):
        redline.train(config, **{"device": "cpu", **options})
    assert {path.name for path in here.iterdir()} == {"corpus.txt"}
