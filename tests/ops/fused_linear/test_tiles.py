"""Tests the tiles of the fused linear layer and similar kernels."""

import pytest

from redline.ops.fused_linear import moment_parts
from redline.ops.fused_linear.reference import MOMENT_COLUMNS

kernel = pytest.importorskip("redline.ops.kernel")
triton = pytest.importorskip("redline.ops.fused_linear.triton")


def test_each_part_of_the_moments_is_written_by_one_block() -> None:
    assert triton.DESCRIPTOR_TILES.columns == MOMENT_COLUMNS
    for size in (2, 4):
        for columns in range(8, 400, 8):
            tiles = triton.TILES[size, triton.kind(columns, True)]
            assert -(-columns // tiles.columns) == moment_parts(columns), (size, columns)


def test_rows_are_split_into_pieces() -> None:
    expected = {8: (16, 0), 16: (16, 0), 24: (32, 0), 64: (64, 0), 72: (64, 16), 184: (128, 64), 216: (256, 0)}
    expected |= {280: (256, 32), 312: (256, 64), 328: (256, 128)}
    assert {channels: kernel.pieces(channels) for channels in expected} == expected
