"""benchmarks/long_context.py runs as a toy, and a length that fails is a row that says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/long_context.py"


@pytest.mark.slow
def test_every_length_is_a_row_and_the_decoder_stops_at_its_limit(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), "--lengths", "70,100", "--decoder-limit", "80"]
    command += ["--slots", "8"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    seen = [(row["arm"], row["length"]) for row in rows]
    assert seen == [
        *[("redline memory", 70), ("redline decoder", 70), ("redline memory, 8 slots", 70)],
        *[("redline memory", 100), ("redline memory, 8 slots", 100)],
    ]
    assert all(row["prefill_tokens_per_s"] > 0 and row["ms_per_token"] > 0 for row in rows)
