"""Tests the tiles of small matrix products, and for which shapes the kernels are used."""

import pytest

from redline.ops.small_matmul.tiles import (
    BLOCK_TILES,
    MANY_ROWS,
    MEASURED,
    VECTOR_TILES,
    Cut,
    beats_cublas,
    cut_depth,
    shape_of,
    tiles_for,
)


@pytest.mark.parametrize(
    ("rows", "most"), [(1, 1), (2, 16), (16, 16), (17, 32), (64, 64), (65, 512), (512, 512), (513, MANY_ROWS)]
)
def test_shapes_use_row_classes(rows: int, most: int) -> None:
    assert shape_of(rows, 7, 9, 2, 1) == (most, 7, 9, 2, 1)


def test_measured_tiles_take_precedence() -> None:
    measured = next(iter(MEASURED))
    assert tiles_for(measured) is MEASURED[measured]
    assert tiles_for((1, 10, 10, 2, 2)) is VECTOR_TILES[2]
    # int8 rows have no kernel for a single row.
    assert tiles_for((1, 10, 10, 1, 1)) is BLOCK_TILES[1, 1][16]
    assert tiles_for((32, 10, 10, 2, 1)) is BLOCK_TILES[2, 1][32]
    assert tiles_for((64, 10, 10, 2, 1)) is BLOCK_TILES[2, 1][MANY_ROWS]


@pytest.mark.parametrize(
    ("programs", "depth", "step", "w_bytes", "cut"),
    [
        (132, 4096, 256, 2, Cut(1, 4096)),  # every multiprocessor is occupied
        (66, 4096, 256, 2, Cut(2, 2048)),
        (1, 4096, 256, 2, Cut(8, 512)),  # no split is shorter than 1,024 bytes
        (1, 4096, 1024, 2, Cut(4, 1024)),  # or than a step
        (44, 4096, 256, 2, Cut(3, 1536)),  # whole steps; the last split has fewer
        (1000, 100, 256, 2, Cut(1, 256)),
    ],
)
def test_features_are_split_among_idle_multiprocessors(
    programs: int, depth: int, step: int, w_bytes: int, cut: Cut
) -> None:
    assert cut_depth(programs, depth, step, w_bytes) == cut


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((1, 10, 16, 2, 2), True),
        ((16, 10, 16, 2, 2), False),
        ((1, 10, 16, 4, 4), False),
        ((64, 10, 16, 2, 1), True),
        ((512, 10, 16, 2, 1), False),
        # Fewer rows if those of the weight are not aligned to 16 bytes.
        ((32, 10, 15, 2, 1), True),
        ((64, 10, 15, 2, 1), False),
        ((1, 10, 15, 2, 2), True),
        ((16, 512, 2048, 2, 2), True),
    ],
)
def test_kernels_are_used_only_where_faster(shape: tuple[int, int, int, int, int], kept: bool) -> None:
    assert beats_cublas(shape) is kept
