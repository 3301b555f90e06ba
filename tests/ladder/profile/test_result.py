import json
from dataclasses import replace

import pytest
import torch

from redline.errors import RedlineError
from redline.ladder.profile import Deeper, Profile, profile
from redline.ladder.profile.page import render_profile


@pytest.fixture(scope="module")
def whole(workload) -> Profile:
    return profile(workload("written_out_training"), device="cpu", attention=True, repeats=2)


def test_json_round_trip(whole: Profile):
    data = json.loads(json.dumps(whole.as_dict()))
    assert data["workload"] == "written_out_training" and data["plan"] == "eager"
    layers = {row["name"]: row for row in data["layers"]["layers"]}
    assert sum(row["share"] for row in layers.values()) == pytest.approx(1)
    assert layers["attention"]["total_s"] >= layers["attention"]["self_s"] > 0
    assert data["memory"]["layers"][0]["total_bytes"] > 0
    assert data["attention"]["kernels"] == ["written out"]


def test_only_what_was_asked_for(workload):
    seen = profile(workload("perceptron"), device="cpu", layers=False, memory=True, repeats=1)
    assert seen.layers is None and seen.attention is None and seen.kernels == () and seen.deeper is None
    assert seen.memory is not None and seen.step_s > 0


def test_a_compiled_model_falls_back_to_kernels(workload):
    seen = profile(workload("compiled"), device="cpu", attention=True, repeats=1)
    assert seen.layers is None
    assert seen.kernels and seen.memory is not None
    assert seen.attention is not None and seen.attention.core_share is None
    assert any("already compiled" in note and "kernels" in note for note in seen.notes)


def test_the_page_is_self_contained_and_escapes(whole: Profile):
    page = render_profile(
        replace(whole, workload="<script>alert(1)</script>", deeper=Deeper("nsys a", "ncu 'b'")), top=3
    )
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "http://" not in page and "https://" not in page
    for text in ("Time by layer", "Memory by layer", "Attention", "Operators", "To go deeper", "nsys a"):
        assert text in page
    assert page.count('<span class="bar">') == 3 + 3 + 3  # by layer, by type, by memory


def test_a_sparse_page_renders(workload):
    seen = profile(workload("compiled"), device="cpu", memory=False, repeats=1)
    page = render_profile(seen)
    assert "Time by layer" not in page and "already compiled" in page
    bare = replace(seen, memory=None, kernels=(), notes=())
    assert "compiled" in render_profile(bare)


def test_flags_and_default_device_are_unchanged(workload):
    def flags() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    before = flags()
    profile(workload("perceptron_training"), device="cpu", attention=True, repeats=1)
    assert flags() == before


def test_failing_model_raises_workload_error(workload):
    with pytest.raises(RedlineError, match="broken: the step failed: ValueError: out of luck"):
        profile(workload("broken"), device="cpu", repeats=1)


@pytest.mark.gpu
def test_a_gpu_profile_has_everything(workload, tmp_path):
    path = tmp_path / "trace.json"
    seen = profile(workload("written_out_training"), device="cuda", attention=True, trace=path, nvtx=True, repeats=2)
    assert seen.deeper is not None and "--nvtx-include" in seen.deeper.ncu
    assert path.is_file() and seen.kernels and seen.layers is not None
    assert "To go deeper" in render_profile(seen)
