"""A perfect restoration passes every case, each defect is found by name, and controls fail."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import RedlineError
from redline.evaluation.drift import CASES, CONTROLS, Case, judge, photo_cases, run_case, video_case
from redline.evaluation.drift.case_run import NewModel
from redline.evaluation.drift.cases import Model
from redline.evaluation.drift.metrics import structural_distance
from synthetic_photos import save_synthetic_photos

FRAMES, SIDE_PX = 90, 48
Spoil = Callable[[Tensor, Tensor, int], Tensor]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    save_synthetic_photos(folder, 3, 128, 128, seed=1)
    return folder


@pytest.fixture(scope="session")
def cases(photos: Path) -> dict[str, Case]:
    """Created once, so that a frame can be identified as the same tensor."""
    found = {}
    for case in photo_cases(str(photos), FRAMES, SIDE_PX, torch.device("cpu"), seed=3):
        moments = list(case.inputs(0))
        found[case.name] = Case(case.name, FRAMES, lambda start, moments=moments: iter(moments[start:]), case.cut)
    return found


def restoring(case: Case, spoil: Spoil = lambda clean, previous, index: clean) -> NewModel:
    """Returns the clean image of each frame, spoiled by a function of it, the previous output and the frame count."""
    moments = list(case.inputs(0))

    def begin() -> Model:
        at, seen = 0, -1

        def make(frame: Tensor, previous: Tensor) -> Tensor:
            nonlocal at, seen
            found = next((index for index, moment in enumerate(moments) if moment.frame is frame), None)
            if found is not None:
                at, seen = found, seen + 1
            # In a probe the frame is another one, and what was added to it is added to the picture.
            return spoil(moments[at].clean + frame - moments[at].frame, previous, seen)

        return make

    return begin


def fallen(case: Case, begin: NewModel) -> set[str]:
    return {finding.name for finding in judge(run_case(begin, case)) if not finding.holds}


def test_a_case_may_begin_at_any_frame(photos: Path) -> None:
    pictures = torch.randint(256, (10, 16, 16, 3), dtype=torch.uint8)
    made = [*photo_cases(str(photos), 10, 16, torch.device("cpu")), video_case("video", lambda: iter(pictures), 10)]
    for case in made:
        whole = list(case.inputs(0))
        for start in (1, 4, 5, 6, 9):
            for one, other in zip(case.inputs(start), whole[start:], strict=True):
                for name in ("frame", "clean", "came_from", "known"):
                    found, expected = getattr(one, name), getattr(other, name)
                    assert found is expected is None or torch.equal(found, expected), (case.name, start, name)


@pytest.mark.parametrize("name", CASES)
def test_a_perfect_restoration_passes(name: str, cases: dict[str, Case]) -> None:
    findings = judge(run_case(restoring(cases[name]), cases[name]))
    assert [finding.sentence for finding in findings if not finding.holds] == []
    asked = {finding.name for finding in findings}
    assert {"gain", "gain drift", "flicker drift", "reacts to its input"} <= asked
    assert ("gets over a cut" in asked) == (name == "cut")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("control", CONTROLS)
def test_controls_fail_on_every_case(control: str, name: str, cases: dict[str, Case]) -> None:
    torch.manual_seed(0)
    red = fallen(cases[name], lambda: CONTROLS[control])
    expected = {
        "constant": {"reacts to its input", "follows its input"},
        "noise": {"follows its input", "steadier than its input"},
        "identity": {"does something", "gain"},
    }
    assert expected[control] <= red


def brighter(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    return clean * (1 + 0.1 * index / FRAMES)


def flatter(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    return clean.mean() + (clean - clean.mean()) * (1 - 0.2 * index / FRAMES)


def softer(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    return torch.lerp(clean, F.avg_pool2d(clean, 5, 1, 2, count_include_pad=False), index / FRAMES)


def frozen_in_the_end(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    return previous if index > FRAMES // 2 else clean


def trembling_more_and_more(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(index))
    return clean + 0.05 * index / FRAMES * noise


def broken_in_the_end(clean: Tensor, previous: Tensor, index: int) -> Tensor:
    return clean * math.nan if index == FRAMES - 1 else clean


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (brighter, "colour drift"),
        (flatter, "contrast drift"),
        (softer, "detail drift"),
        (frozen_in_the_end, "reacts to its input"),
        (trembling_more_and_more, "flicker drift"),
        (broken_in_the_end, "gain drift"),
    ],
)
def test_what_is_wrong_is_named(spoil: Spoil, named: str, cases: dict[str, Case]) -> None:
    assert named in fallen(cases["moving"], restoring(cases["moving"], spoil))


def dawn(frames: int = 96, growth: float = 0.6) -> Case:
    """A video that becomes brighter; without growth it is constant."""
    texture = torch.rand(24, 32, 3, generator=torch.Generator().manual_seed(2)) * 0.2 + 0.1
    pictures = [(255 * (texture + growth * index / frames)).byte() for index in range(frames)]
    return video_case("dawn", lambda: iter(pictures), frames)


def test_what_comes_with_the_frame_is_no_drift() -> None:
    """A gamma curve brightens dark frames more, so its effect changes with the content, which is no drift."""
    watched = run_case(lambda: lambda frame, previous: frame**0.8, dawn())
    assert len(watched.restarted) == len(watched.last) == 8
    found = {finding.name: finding for finding in judge(watched)}
    assert all(finding.holds for finding in found.values())
    assert found["colour drift"].value < 1e-6 and abs(found["colour drift"].since_first or 0) > 0.1


def test_what_feeds_on_itself_is_found() -> None:
    """Each output is 1% brighter than a mix of the frame and the previous output: visible in 100 frames, not in 16."""

    def make(frame: Tensor, previous: Tensor) -> Tensor:
        return 1.01 * torch.lerp(previous, frame, 0.06)

    assert "colour drift" in fallen(dawn(growth=0.0), lambda: make)


@pytest.mark.parametrize("name", CASES)
def test_what_feeds_on_itself_and_settles_at_once_is_found(name: str, cases: dict[str, Case]) -> None:
    def reddening(clean: Tensor, previous: Tensor, index: int) -> Tensor:
        red = (previous - clean).mean((2, 3), keepdim=True).clamp(min=0) * 0.6 + 0.02
        return clean + red * torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)

    red = fallen(cases[name], restoring(cases[name], reddening))
    assert "colour feedback" in red and "colour drift" not in red


def test_a_remaining_old_scene_is_found(cases: dict[str, Case]) -> None:
    def ghost(clean: Tensor, previous: Tensor, index: int) -> Tensor:
        return torch.lerp(clean, previous, 0.93) if index >= FRAMES // 2 else clean

    assert "gets over a cut" in fallen(cases["cut"], restoring(cases["cut"], ghost))


def test_of_a_video_only_its_frames_are_known() -> None:
    torch.manual_seed(1)
    pictures = F.interpolate(torch.rand(64, 3, 6, 6), size=(33, 47)).mul(255).byte().permute(0, 2, 3, 1)
    case = video_case("film", lambda: iter(pictures), len(pictures))
    findings = judge(run_case(lambda: lambda frame, previous: frame * 0.9 + 0.02, case))
    assert all(finding.holds for finding in findings)
    assert not {"gain", "flicker drift"} & {finding.name for finding in findings}
    assert fallen(case, lambda: CONTROLS["identity"]) == {"does something"}


def test_too_few_frames_and_other_sizes_are_refused(cases: dict[str, Case]) -> None:
    short = video_case("short", lambda: iter(torch.zeros(3, 16, 16, 3, dtype=torch.uint8)), 3)
    with pytest.raises(RedlineError, match="needs at least 64 frames, not 3"):
        run_case(lambda: CONTROLS["identity"], short)
    with pytest.raises(RedlineError, match=r"\(1, 3, 24, 24\) for a frame of shape \(1, 3, 48, 48\)"):
        run_case(lambda: lambda frame, previous: F.avg_pool2d(frame, 2), cases["still"])


def test_the_same_case_twice_is_the_same(cases: dict[str, Case]) -> None:
    first, second = (run_case(restoring(cases["moving"]), cases["moving"]) for _ in range(2))
    assert repr(first) == repr(second) and len(first.rows) == FRAMES


def test_structural_distance_knows_its_ends() -> None:
    one, other = torch.rand(2, 1, 3, SIDE_PX, SIDE_PX).unbind(0)
    assert structural_distance(one, one).abs() < 1e-6
    assert 0.7 < structural_distance(one, other) < 1.1
    assert structural_distance(one[..., :5, :5], other[..., :5, :5]) > 0
