"""On a GPU: the config of the bundled chat model trains in bf16 with its plan, resumes bit for bit, and chats."""

import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.generation.text_generator import TextGenerator
from redline.training.bundled import CONFIGS
from redline.training.loop import Progress
from redline.training.text.run import prepare_training, run_text
from talk_tokenizer import small_talk_tokenizer

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    settings = tomllib.loads((CONFIGS / "talk-small.toml").read_text())
    (tmp_path / "tokenizer.json").write_text(small_talk_tokenizer(512).to_text())
    settings["tokenizer"] = {"file": str(tmp_path / "tokenizer.json")}
    settings["data"] |= {"workers": 2, "batch": 8, "validation_rows": 16}
    settings["training"] |= {"steps": 30, "warmup_steps": 5, "log_every": 5, "validate_every": 20}
    settings["training"].pop("minutes")
    return settings


@pytest.mark.filterwarnings("ignore")
def test_the_bundled_config_trains_resumes_and_chats(config: dict[str, Any], tmp_path: Path) -> None:
    def run(out: Path, resume: bool = False, progress: Any = lambda now: None) -> Any:
        task = prepare_training(config, out, GPU, resume, lambda _: None, lambda _: None)
        return run_text(task, out, GPU, resume, progress, lambda _: None)

    whole, result = run(tmp_path / "whole")
    losses = [entry["loss"] for entry in whole.entries if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0] and whole.figures["validation_loss"] < losses[0]

    def stop(now: Progress) -> None:
        if now.step == 10:
            signal.raise_signal(signal.SIGTERM)

    assert run(tmp_path / "pieces", progress=stop)[0].interrupted
    resumed, _ = run(tmp_path / "pieces", resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    text = TextGenerator(result.model, device="cuda").chat([{"role": "user", "content": "Hello"}], max_tokens=8)
    assert 0 < len(text.tokens) <= 8
