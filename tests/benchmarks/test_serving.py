"""benchmarks/serving.py runs with a tiny model, and every case is a row with figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/serving.py"


@pytest.mark.slow
def test_every_case_is_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, str(SCRIPT), "--tiny", "--out", str(out)], check=True, capture_output=True)
    rows = {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}
    cases = ("offline", "batch_32", "single", "prefill", "prefix", "long_prompt", "grammar", "sessions")
    assert tuple(rows) == cases and all("failure" not in row for row in rows.values())
    assert rows["offline"]["measured"]["output_tokens_per_s"] > 0 and rows["prefix"]["measured"]["ratio"] > 0
