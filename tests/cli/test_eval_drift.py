"""`redline eval drift`: findings, a page and rows for photos and for a video; what does not restore is told so."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redline.evaluation.drift import Finding, judge
from redline.models.lsd import Lsd, LsdConfig, save_lsd
from redline.stream import drift
from synthetic_photos import save_synthetic_photos
from upscale.video.clips import make_clip

from .conftest import Seen
from .test_bad_input import assert_one_sentence

OPTIONS = ("--frames", 64, "--size", 32, "--device", "cpu")
# More than controls are shown.
LONGER = 66


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Lsd(LsdConfig(2, 8, (1, 2), control=0))
    with torch.no_grad():
        model.head.weight.mul_(0.1)
    save_lsd(model, tmp_path / "toy.safetensors", about={"sample_steps": "3"})
    return tmp_path / "toy.safetensors"


def test_photos_make_three_cases_and_controls_are_refused_over_a_cut_of_their_own(
    weights: Path, tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[list[Finding]] = []
    monkeypatch.setattr("redline.stream.drift.judge", lambda watched: judged.append(judge(watched)) or judged[-1])
    save_synthetic_photos(tmp_path / "photos", 2, 80, 80, seed=1)
    written = ("--page", "d.html", "--out", "rows.jsonl")
    given = (*OPTIONS, "--frames", LONGER, "--steps", 1, *written)
    seen = command("eval", "drift", weights, tmp_path / "photos", *given)
    assert seen.code == 1 and "the controls failed, as they must: constant, noise, identity" in seen.out
    assert "not stable" in seen.out and "gets over a cut" in seen.out
    page = (tmp_path / "d.html").read_text()
    assert (
        page.count("<svg") > 9
        and "<script" not in page
        and "http" not in page.replace("http-equiv", "").replace("http-equiv", "")
        and "identity</strong>: refused" in page
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * LONGER and {row["case"] for row in rows} == {"moving", "still", "cut"}
    assert "flicker" in rows[1] and "flicker" not in rows[0] and "response" in rows[0]
    over_a_cut = [found for found in judged if any(finding.name == "gets over a cut" for finding in found)]
    assert len(over_a_cut) == 4, "of the model and of three controls"


def test_docstring_examples(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_clip(tmp_path / "clip.mp4", frames=64, size=(16, 16), pixel_format="yuv444p")
    results = doctest.testmod(drift)
    assert results.attempted and not results.failed


def test_a_video_is_watched_to_its_end(weights: Path, tmp_path: Path, command: Callable[..., Seen]) -> None:
    make_clip(tmp_path / "video.mp4", frames=70, size=(51, 35), pixel_format="yuv444p")
    seen = command("eval", "drift", weights, tmp_path / "video.mp4", *OPTIONS, "--no-controls", "--json").json()
    names = {finding["name"] for finding in seen["findings"]}
    assert "reacts to its input" in names and "gain" not in names and seen["controls_that_passed"] == []
    assert seen["steps"] == 3 and seen["plan"] == "eager", "as it was made for"


def test_the_folder_of_a_training_and_a_number_of_steps_are_taken(
    weights: Path, tmp_path: Path, command: Callable[..., Seen]
) -> None:
    make_clip(tmp_path / "video.mp4", frames=64, size=(32, 32), pixel_format="yuv444p")
    (tmp_path / "trained").mkdir()
    weights.rename(tmp_path / "trained" / "model.safetensors")
    given = ("--no-controls", "--json", "--steps", 1, "--plan", "channels_last", "--page", "d.html")
    seen = command("eval", "drift", tmp_path / "trained", tmp_path / "video.mp4", *OPTIONS, *given).json()
    assert seen["steps"] == 1 and seen["plan"] == "channels_last" and "reacts" in str(seen["findings"])
    assert "1 step · plan channels_last" in (tmp_path / "d.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("{weights}", "nowhere.mp4"), "'nowhere.mp4' does not exist"),
        ((".", "."), "is not a model folder"),
        (("nothing.safetensors", "."), "cannot read the safetensors file 'nothing.safetensors'"),
        (("{weights}", ".", "--frames", 3), "at least 64 frames"),
        (("{weights}", ".", "--size", 0), "size must be at least 1 pixel"),
        (("{weights}", ".", "--page", "nowhere/d.html"), "its folder does not exist"),
        (("{weights}", ".", "--sampler", "euler"), "unknown sampler 'euler'"),
        (("{weights}", "."), "the folder '.'"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: tuple[object, ...], sentence: str, weights: Path, command: Callable[..., Seen]
) -> None:
    seen = command("eval", "drift", *(str(one).format(weights=weights) for one in arguments))
    assert_one_sentence(seen, sentence)
