"""The Python on the page about live video runs."""

import re
from pathlib import Path

import pytest

from patience import HANGS_S

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stream.md"


@pytest.mark.timeout(HANGS_S)
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    for block in blocks:
        exec(block, names)
    lines = capsys.readouterr().out.splitlines()
    assert len(blocks) == 3 and lines[0].startswith("5 0.") and lines[0].endswith(" {} restored.mp4")
    assert lines[1:6] == [f"{index} torch.Size([24, 32, 3])" for index in range(5)] and lines[6].startswith("5 0.")
    assert (tmp_path / "stream.html").exists()
