"""`redline export`: a plan and a workload, or drct alone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import redline
from redline.ladder.gate import Score

from .conftest import TINY, Seen

MANIFEST = SimpleNamespace(
    scores=(Score("relative_error", 0.001, 0.02, "lower", True),),
    as_dict=lambda: {"form": "onnx"},
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan.toml"], "what should 'plan.toml' be applied to? Write redline export PLAN WORKLOAD --out model.pt2"),
        (["eager", "resnet"], "name the artifact with --out: model.pt2, model.onnx, or a folder."),
        (["eager", "resnet", "--tile", "64", "-o", "a.pt2"], "--tile is for `redline export drct`"),
        (["drct", "--shape", "batch=2"], "--shape is for a workload"),
        (["drct", "--format", "pt2"], "unknown format 'pt2': only onnx is supported."),
        (["plan.toml", "resnet", "-o", "a.pt2"], "cannot read the plan 'plan.toml'"),
        (["eager", f"{TINY}:nothing", "-o", "a.pt2"], "returned NoneType"),
    ],
)
def test_bad_requests(arguments: list[str], sentence: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    seen = command("export", *arguments)
    assert seen.code == 2 and sentence in " ".join(seen.err.split()) and not list(tmp_path.iterdir())


def test_the_result(command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def export(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options["options"], options["device"]))
        return SimpleNamespace(path=Path("a.onnx"), bytes=2**20, load_s=2.5, manifest=MANIFEST)

    monkeypatch.setattr(redline, "export", export, raising=False)
    seen = command("export", "compile", "resnet", "--shape", "batch=1", "-o", "a.onnx", "--device", "cpu")
    assert asked == [(("compile", "resnet", "a.onnx"), {"batch": 1}, "cpu")]
    assert "a.onnx  1 MiB, loads in 2.5 s" in seen.out and "relative_error 0.001 (within ≤ 0.02)" in seen.out
    assert command("export", "compile", "resnet", "-o", "a.onnx", "--json").json() == {
        "path": "a.onnx",
        "bytes": 2**20,
        "form": "onnx",
    }
