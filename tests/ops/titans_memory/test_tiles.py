"""Tests the tiles of the Titans memory for the size of a device."""

import pytest
import torch

host = pytest.importorskip("redline.ops.titans_memory.triton")


def test_blocks_are_small_if_few_programs_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.kernel, "_INTERPRETED_PROCESSORS", 132)

    def values(batch: int, size: int = 64) -> int:
        q = torch.empty(batch, 128, 12, size, dtype=torch.bfloat16, device="meta")
        return host.launcher(q, q, None, 64).tiles.values

    assert [values(1), values(2), values(4)] == [16, 16, 32]
    assert [values(1, 128), values(22, 128)] == [16, 16]
