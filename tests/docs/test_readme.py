"""What the README shows is run: the workload of one's own, and the three lines that apply a plan."""

import re
from pathlib import Path

import pytest
import torch

from redline import Plan, load_workload

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_workload_loads_and_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    workload = load_workload(f"{tmp_path / 'mine.py'}:encoder", {"batch": 2})
    with torch.no_grad():
        output = workload.fresh_model("cpu").eval()(workload.fresh_inputs(0, "cpu"))
    assert output.shape == (2, 128, 256)


def test_the_three_lines_apply_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in BLOCKS[1].splitlines() if line.strip()]
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    Plan.parse("fold_batchnorm + channels_last").save("plan.toml")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    names = {"model": model, "batch": torch.randn(2, 3, 9, 9)}
    exec("\n".join(lines), names)
    with torch.no_grad():
        torch.testing.assert_close(names["output"], model(names["batch"]), rtol=1e-4, atol=1e-5)
    assert isinstance(model[1], torch.nn.BatchNorm2d)
