"""Tests the tiles of the gated delta rule for the size of a device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

host = pytest.importorskip("redline.ops.gated_delta_rule.triton")


def test_blocks_are_small_for_few_programs_and_wide_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.kernel, "_INTERPRETED_PROCESSORS", 132)

    def tiles(batch: int, dtype: torch.dtype, size: int = 64, chunk: int = 64) -> tuple[Any, Any]:
        q = torch.empty(batch, 128, 12, size, dtype=dtype, device="meta")
        return host.launcher(q, q, None, chunk).tiles, host.tiles_for(q, q, chunk)

    for batch in (1, 2):
        fine, usual = tiles(batch, torch.bfloat16)
        assert (fine.values, fine.stages) == (16, 3) and (usual.values, usual.stages) == (32, 2)
        assert fine == replace(usual, values=16, stages=3)
    for few in (tiles(4, torch.bfloat16), tiles(1, torch.float32), tiles(1, torch.bfloat16, 128)):
        assert few[0] == few[1]
    wide, usual = tiles(22, torch.bfloat16)
    assert wide == replace(usual, values=64)
    assert tiles(22, torch.bfloat16, 40)[0].values == 64 and tiles(22, torch.bfloat16, 30)[0].values == 32
    for other in (tiles(21, torch.bfloat16), tiles(22, torch.float32), tiles(22, torch.bfloat16, 128)):
        assert other[0] == other[1]
