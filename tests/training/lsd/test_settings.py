"""The stages of an LSD's training, and which settings are refused."""

from dataclasses import replace
from typing import Any

import pytest

from redline.datasets.clips.settings import ClipSettings
from redline.errors import RedlineError
from redline.files.config_fields import decode
from redline.models.samplers import MOST_STEPS
from redline.training.lsd.settings import LsdLoopSettings, LsdSettings, LsdTraining, StageSettings

STAGES = StageSettings()


@pytest.mark.parametrize(
    ("progress", "stage"),
    [(0.0, "diffusion"), (0.34, "diffusion"), (0.35, "rollouts"), (0.74, "rollouts"), (0.75, "distillation")],
)
def test_each_stage_starts_at_its_share(progress: float, stage: str) -> None:
    assert STAGES.at(progress) == stage


def test_a_stage_with_share_1_never_starts() -> None:
    never = replace(STAGES, rollouts_from=1.0, distillation_from=1.0)
    assert never.at(1.0) == "diffusion" and not never.has_teacher
    assert replace(STAGES, distillation_from=1.0).at(1.0) == "rollouts"
    assert STAGES.has_teacher and not replace(STAGES, teacher_share=0.0).has_teacher


@pytest.mark.parametrize(
    "change",
    [
        {"rollouts_from": 0.0, "distillation_from": 0.0},
        {"frames": 2, "teacher_steps": 1, "sample_steps": 1},
        {"sample_steps": MOST_STEPS},
        {"teacher_share": 1.0, "teacher_decay": 0.0, "corruption": 1.0, "steadiness": 0.0},
    ],
    ids=str,
)
def test_stages_at_their_limits_are_taken(change: dict[str, Any]) -> None:
    assert decode(StageSettings, change, "under [stages]")


@pytest.mark.parametrize(
    "change",
    [
        {"rollouts_from": -0.1},
        {"rollouts_from": 0.8},
        {"distillation_from": 1.1},
        {"frames": 1},
        {"teacher_steps": 0},
        {"sample_steps": 0},
        {"sample_steps": MOST_STEPS + 1},
        {"teacher_share": 1.1},
        {"teacher_decay": -0.1},
        {"corruption": 1.1},
        {"steadiness": -0.1},
    ],
    ids=str,
)
def test_stages_beyond_their_limits_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RedlineError, match=next(iter(change))):
        decode(StageSettings, change, "under [stages]")


@pytest.mark.parametrize("name", ["validation_clips", "validation_frames", "final_frames"])
def test_validation_needs_a_clip_of_four_frames(name: str) -> None:
    least = 1 if name == "validation_clips" else 4
    assert decode(LsdLoopSettings, {"steps": 1, name: least}, "under [training]")
    with pytest.raises(RedlineError, match=f"{name} = .*at least {least}"):
        decode(LsdLoopSettings, {"steps": 1, name: least - 1}, "under [training]")


def test_given_dimensions_override_the_size() -> None:
    config = LsdSettings("light", width=8, attending=0).config
    assert (config.width, config.attending, config.blocks) == (8, 0, 1)
    with pytest.raises(RedlineError, match="fp16, fp32"):
        decode(LsdSettings, {"weights": "bf16"}, "under [model]")


def test_frame_px_must_be_a_multiple_of_the_model_stride() -> None:
    def training(frame_px: int) -> LsdTraining:
        data = ClipSettings("photos", frame_px=frame_px, world_px=96)
        return LsdTraining(LsdSettings(), data, STAGES, LsdLoopSettings(steps=1))

    assert training(48).to_dict()["data"]["photos"] == "photos"
    with pytest.raises(RedlineError, match="multiple of 16"):
        training(56)
