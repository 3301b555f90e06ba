"""How products of a few rows are cut, and for which sizes they are kept: what the benchmark's sweep looks for.

A product is named by a `Shape`: the class of its number of rows (1, up to 16, 32, 64 or 512, or more), outputs, depth,
and the bytes of one number of x and of the weight. Sizes in `MEASURED` were swept on a GPU; all others follow the
tables by rows and dtype.
"""

from dataclasses import dataclass

MANY_ROWS = 2**31
_ROW_CLASSES = (1, 16, 32, 64, 512, MANY_ROWS)

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Tiles:
    """Rows, outputs and depth of a block, warps of a program, steps of its loop in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cut:
    """Into how many shares the depth is cut, and how deep each is."""

    shares: int
    share: int


# The best tiles of a shape, or None where cuBLAS is faster than any: on an H200, one row and the weights of a 1.24B
# Llama in int8, read from memory each time; and few outputs in bf16, for which cuBLAS leaves multiprocessors idle.
MEASURED: dict[Shape, Tiles | None] = {
    (1, 128_256, 2048, 2, 1): Tiles(1, 4, 512, 1, 1),
    (1, 16_384, 2048, 2, 1): Tiles(1, 4, 512, 1, 1),
    (1, 3072, 2048, 2, 1): Tiles(1, 4, 1024, 4, 1),
    (1, 2048, 8192, 2, 1): Tiles(1, 2, 2048, 4, 1),
    (16, 512, 2048, 2, 2): Tiles(16, 16, 256, 4, 4),
    (16, 64, 4096, 2, 2): Tiles(16, 16, 256, 4, 4),
}
# The tiles below were raced against cuBLAS, and not swept: what `benchmarks/kernels/small_matmul.py --sweep` and
# `benchmarks/kernels/int8_matmul.py --sweep` print replaces them.
# One row, by bytes of a number of the weight: 16 bytes a thread and load, and many programs a multiprocessor.
VECTOR_TILES = {1: Tiles(1, 2, 1024, 2, 1), 2: Tiles(1, 2, 2048, 4, 1), 4: Tiles(1, 2, 1024, 4, 1)}
# More rows, by bytes of a number of x and of the weight, and the most rows that the tiles are for.
BLOCK_TILES = {
    (2, 2): {16: Tiles(16, 16, 256, 4, 4)},
    (4, 4): {16: Tiles(16, 16, 64, 4, 3)},
    (2, 1): {16: Tiles(16, 16, 256, 4, 4), 32: Tiles(32, 32, 128, 4, 4), MANY_ROWS: Tiles(64, 64, 128, 4, 4)},
    (4, 1): {16: Tiles(16, 16, 64, 4, 3), 32: Tiles(32, 32, 64, 4, 3), MANY_ROWS: Tiles(64, 64, 32, 4, 3)},
    (1, 1): {
        16: Tiles(16, 16, 512, 4, 4),
        32: Tiles(32, 32, 256, 4, 4),
        64: Tiles(64, 64, 256, 4, 3),
        MANY_ROWS: Tiles(128, 128, 128, 8, 3),
    },
}
# The most rows for which the kernels are kept, by bytes of a number of x and of the weight, by races on an H200. In
# bf16 one row is faster than by cuBLAS, two are not; in fp32 nothing is measured, so nothing is kept. Weights in int8
# have no other way that does not write them out first, which only hundreds of rows pay for (raced with rows in bf16;
# fp32 follows). Of int8 rows as many as were raced: torch scales its sums in kernels of their own.
LARGEST_ROWS = {(2, 2): 1, (4, 4): 0, (2, 1): 64, (4, 1): 64, (1, 1): 512}
# Of a weight whose rows do not begin at such bytes, blocks are read number by number: more rows are faster otherwise.
ALIGNED_BYTES, LARGEST_UNALIGNED_ROWS = 16, 32
# Programs that keep every multiprocessor of the largest GPUs busy.
PROGRAMS = 132
# A share shorter than this costs more to add up than it saves.
SHORTEST_SHARE_BYTES = 1024


def shape_of(rows: int, columns: int, depth: int, x_bytes: int, w_bytes: int) -> Shape:
    most = min(most for most in _ROW_CLASSES if rows <= most)
    return most, columns, depth, x_bytes, w_bytes


def tiles_for(shape: Shape) -> Tiles:
    """The measured tiles, else those for so many rows; int8 rows have no kernel for one row alone."""
    measured = MEASURED.get(shape)
    if measured is not None:
        return measured
    rows, _, _, x_bytes, w_bytes = shape
    if rows == 1 and x_bytes > 1:
        return VECTOR_TILES[w_bytes]
    choices = BLOCK_TILES[x_bytes, w_bytes]
    return choices[min(most for most in choices if rows <= most)]


def cut_depth(programs: int, depth: int, step: int, w_bytes: int) -> Cut:
    """As many shares as there are idle multiprocessors for, each a whole number of steps deep."""
    shortest = max(step, SHORTEST_SHARE_BYTES // w_bytes)
    wanted = max(1, min(PROGRAMS // programs, depth // shortest))
    share = -(-depth // (wanted * step)) * step
    return Cut(-(-depth // share), share)


def is_kept(shape: Shape) -> bool:
    """Whether the kernels are faster than cuBLAS for these."""
    if shape in MEASURED:
        return MEASURED[shape] is not None
    rows, _, depth, x_bytes, w_bytes = shape
    most = LARGEST_ROWS[x_bytes, w_bytes]
    return rows <= (min(most, LARGEST_UNALIGNED_ROWS) if depth * w_bytes % ALIGNED_BYTES else most)
