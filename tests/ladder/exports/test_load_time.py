"""The bundled CNN loads within five seconds in a new process, in every form."""

from pathlib import Path

import pytest

import redline

LIMIT_S = 5.0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("plan", "out"),
    [
        ("fold_batchnorm", "resnet.onnx"),
        ("fold_batchnorm + channels_last", "resnet"),
        ("fold_batchnorm + compile", "resnet.pt2"),
    ],
    ids=["onnx", "folder", "aot"],
)
def test_the_bundled_network(plan: str, out: str, tmp_path: Path) -> None:
    made = redline.export(plan, "resnet", tmp_path / out, device="cpu", progress=None)
    assert 0.1 < made.load_s <= LIMIT_S and redline.load_exported(made.path).manifest.load_s == made.load_s
