"""The rungs that a climb tries, their variants and their order."""

from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.ladder.rung import Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.search_order import candidates, check_asked
from redline.ladder.search.settings import Settings, read_rungs
from redline.machine.machine import Machine


def test_launch_rungs_are_not_tried_for_train_workloads(tmp_path: Path) -> None:
    def tried(workload: str) -> set[str]:
        settings = Settings(workload, tmp_path, device="cpu")
        return {rung.name for rung in candidates(settings, Machine.detect("cpu"), True)}

    left_out = tried("gpt") - tried("train:decoder-tiny")
    assert "cuda_graph" in left_out and all(RUNGS[name].stage is Stage.LAUNCH for name in left_out)
    assert not any(RUNGS[name].stage is Stage.LAUNCH for name in tried("train:decoder-tiny"))


def test_excluded_name_covers_all_variants_and_options_cover_one(tmp_path: Path) -> None:
    def tried(**asked: tuple[str, ...]) -> list[str]:
        settings = Settings(
            "resnet", tmp_path, device="cpu", **{name: read_rungs(texts) for name, texts in asked.items()}
        )
        return [str(rung) for rung in candidates(settings, Machine.detect("cpu"), False)]

    everything = tried()
    assert {"compile", "compile(freeze=true)"} <= set(everything)
    assert set(everything) - set(tried(without=("compile",))) == {"compile", "compile(freeze=true)"}
    # With options only that variant goes; the plain one is the name, so it goes with all of them.
    assert set(everything) - set(tried(without=("compile(freeze=true)",))) == {"compile(freeze=true)"}
    assert tried(
        only=(
            "compile(dynamic=true)",
            "tf32",
        )
    ) == ["tf32", "compile(dynamic=true)"]


@pytest.mark.parametrize(
    ("rung", "workload", "training", "sentence"),
    [
        ("fold_batchnorm", "resnet", True, "fold_batchnorm is for inference"),
        ("grad_scaler", "resnet", False, "grad_scaler is for training steps"),
        ("cuda_graph", "train:decoder-tiny", True, "cuda_graph launches whole steps"),
    ],
)
def test_a_rung_that_cannot_be_tried_is_refused_by_name(
    rung: str, workload: str, training: bool, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RedlineError, match=sentence):
        check_asked(Settings(workload, tmp_path, device="cpu", only=read_rungs((rung,))), training)
    check_asked(
        Settings("resnet", tmp_path, device="cpu", only=read_rungs(("bf16", "compile", "cuda_graph"))), training
    )
