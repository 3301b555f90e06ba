"""benchmarks/packing.py: the same documents packed and padded, and what each wastes."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    return load_script("packing")


def test_batches_are_of_the_documents_that_were_drawn(packing: ModuleType) -> None:
    text = packing.Text(length=64, rows=5, median=12)
    batch = text.packed(3)
    ends = (batch.targets_BS == packing.NO_TARGET).nonzero()
    for row in range(5):
        lengths = text.lengths(3 * 5 + row, 32).cumsum(0)
        expected = [*(end - 1 for end in lengths.tolist() if end < 64), 63]
        assert ends[ends[:, 0] == row, 1].tolist() == expected
    lengths = text.lengths(3, 5)
    for to_longest in (True, False):
        padded = text.padded(3, to_longest)
        assert (padded.targets_BS != packing.NO_TARGET).sum(1).tolist() == (lengths - 1).tolist()
    # Every document of one row, and all rows of the packed text, are as many tokens.
    assert text.sequences()["packed"] == -(-int(text.lengths(0, packing.DOCUMENTS).sum()) // 64)


def test_every_arm_is_a_row(packing: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--length", "64", "--rows", "2", "--rounds", "1", "--steps", "1", "--device", "cpu"]
    assert packing.main(["--out", str(out), *options]) == 0
    packed, *padded = [json.loads(line) for line in out.read_text().splitlines()]
    assert packed["arm"] == "packed" and [row["arm"][:13] for row in padded] == ["padded to the"] * 2
    for row in padded:
        assert row["tokens_per_s"] > 0 and row["waste"] > packed["waste"] and row["sequences"] > packed["sequences"]
