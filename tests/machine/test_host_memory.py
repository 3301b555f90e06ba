"""Host memory: freed memory does not count as resident."""

from pathlib import Path

import pytest
import torch

from redline.machine.host_memory import available_host_bytes, resident_bytes, return_freed_memory

_PIECE_BYTES = 16 * 2**20


def test_freed_memory_is_returned_to_the_system() -> None:
    return_freed_memory()  # from earlier tests
    before = resident_bytes()
    pieces = [torch.ones(_PIECE_BYTES // 4) for _ in range(16)]
    held = resident_bytes() - before
    assert held > 15 * _PIECE_BYTES
    pieces.clear()
    return_freed_memory()
    assert resident_bytes() - before < held / 4


@pytest.mark.parametrize(
    ("stat", "free"), [("anon 700\ninactive_file 250\nactive_file 50\n", 500), ("anon 700\n", 250), (None, 250)]
)
def test_page_cache_of_a_container_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stat: str | None, free: int
) -> None:
    monkeypatch.setattr("redline.machine.host_memory._CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("1250\n")
    (tmp_path / "memory.current").write_text("1000\n")
    if stat is not None:
        (tmp_path / "memory.stat").write_text(stat)
    assert available_host_bytes() == free
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() > 1250
