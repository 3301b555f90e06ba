"""Memory of the host: what was freed does not count as held."""

import torch

from redline.resident import resident_bytes, return_freed_memory

_PIECE_BYTES = 16 * 2**20


def test_what_was_freed_is_given_back() -> None:
    return_freed_memory()  # of tests before this one
    before = resident_bytes()
    pieces = [torch.ones(_PIECE_BYTES // 4) for _ in range(16)]
    held = resident_bytes() - before
    assert held > 15 * _PIECE_BYTES
    pieces.clear()
    return_freed_memory()
    assert resident_bytes() - before < held / 4
