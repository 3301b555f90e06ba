"""Every committed table can be written as HTML."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import full_tables

    assert full_tables.main(["--out", str(tmp_path)]) == 0
    climbs, models = ((tmp_path / name).read_text("utf-8") for name in ("climbs.html", "models.html"))
    assert "<td>channels_last</td>" in climbs and climbs.count("<table>") > 50
    assert "causal_attention.jsonl" in models and models.count("<table>") > 30
    for name in ("full_tables", "tables", "model_tables", "goals"):
        sys.modules.pop(name, None)
