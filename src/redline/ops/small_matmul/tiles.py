"""Tile sizes of small matrix multiplications, and the shapes for which the kernels are faster than cuBLAS.

A `Shape` holds the class of the number of rows (1, up to 16, 32, 64 or 512, or more), the numbers of outputs and
features, and the element sizes of x and of the weight in bytes. For the shapes in `MEASURED`, many tiles were timed on
a GPU; other shapes use the tables by rows and element sizes. Only compute capability 9.0 was measured (an H200): GPUs
of other classes use the same tables, and `redline doctor` says so.
"""

from dataclasses import dataclass

MANY_ROWS = 2**31
_ROW_CLASSES = (1, 16, 32, 64, 512, MANY_ROWS)

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Tiles:
    """Rows, outputs and features per block, warps per program, and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cut:
    """Split-K: the number of splits of the features (`shares`), and the features per split (`share`)."""

    shares: int
    share: int


# The best tiles of a shape on an H200, or None if cuBLAS is faster than any. The measured shapes are one row with the
# int8 weights of a 1.24B Llama (read from device memory each time, not from the cache), and few outputs in bf16, for
# which cuBLAS leaves multiprocessors idle.
MEASURED: dict[Shape, Tiles | None] = {
    (1, 128_256, 2048, 2, 1): Tiles(1, 4, 512, 1, 1),
    (1, 16_384, 2048, 2, 1): Tiles(1, 4, 512, 1, 1),
    (1, 3072, 2048, 2, 1): Tiles(1, 4, 1024, 4, 1),
    (1, 2048, 8192, 2, 1): Tiles(1, 2, 2048, 4, 1),
    (16, 512, 2048, 2, 2): Tiles(16, 16, 256, 4, 4),
    (16, 64, 4096, 2, 2): Tiles(16, 16, 256, 4, 4),
}
# The tiles below were compared with cuBLAS, but not with other tiles. `benchmarks/kernels/small_matmul.py --sweep` and
# `benchmarks/kernels/int8_matmul.py --sweep` print the best tiles.
# Tiles for one row of x, by element size of the weight. Each load of a thread is 16 bytes, and many programs fit a
# multiprocessor.
VECTOR_TILES = {1: Tiles(1, 2, 1024, 2, 1), 2: Tiles(1, 2, 2048, 4, 1), 4: Tiles(1, 2, 1024, 4, 1)}
# Tiles for more rows, by the element sizes of x and of the weight, then by the largest number of rows of x.
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
# The kernels are used for at most this many rows, by element sizes of x and of the weight, as measured on an H200. In
# bf16 the kernels beat cuBLAS for one row, but not for two; fp32 was not measured, so cuBLAS is used. With int8 weights
# the alternative is to dequantize the weight to memory, which pays off only for hundreds of rows (measured for bf16 x,
# assumed for fp32). With int8 x the limit is the largest number of rows that was measured; the alternative, torch's
# int8 multiplication, needs separate kernels to scale the sums.
LARGEST_ROWS = {(2, 2): 1, (4, 4): 0, (2, 1): 64, (4, 1): 64, (1, 1): 512}
# If the weight's rows are not aligned to ALIGNED_BYTES, blocks are loaded element by element, so the kernels are used
# for at most LARGEST_UNALIGNED_ROWS rows of x.
ALIGNED_BYTES, LARGEST_UNALIGNED_ROWS = 16, 32
# The number of programs that occupies every multiprocessor of the largest GPUs.
PROGRAMS = 132
# A split has at least this many bytes of each row of the weight: shorter splits cost more than they save.
SHORTEST_SPLIT_BYTES = 1024


def shape_of(rows: int, columns: int, depth: int, x_bytes: int, w_bytes: int) -> Shape:
    most = min(most for most in _ROW_CLASSES if rows <= most)
    return most, columns, depth, x_bytes, w_bytes


def tiles_for(shape: Shape) -> Tiles:
    """Returns the measured tiles of the shape, or else those of the tables. A single int8 row uses BLOCK_TILES."""
    measured = MEASURED.get(shape)
    if measured is not None:
        return measured
    rows, _, _, x_bytes, w_bytes = shape
    if rows == 1 and x_bytes > 1:
        return VECTOR_TILES[w_bytes]
    choices = BLOCK_TILES[x_bytes, w_bytes]
    return choices[min(most for most in choices if rows <= most)]


def cut_depth(programs: int, depth: int, step: int, w_bytes: int) -> Cut:
    """Splits the features if multiprocessors would be idle. The features per split are a multiple of `step`."""
    shortest = max(step, SHORTEST_SPLIT_BYTES // w_bytes)
    wanted = max(1, min(PROGRAMS // programs, depth // shortest))
    share = -(-depth // (wanted * step)) * step
    return Cut(-(-depth // share), share)


def beats_cublas(shape: Shape) -> bool:
    """Returns whether the kernels are faster than cuBLAS for this shape."""
    if shape in MEASURED:
        return MEASURED[shape] is not None
    rows, _, depth, x_bytes, w_bytes = shape
    most = LARGEST_ROWS[x_bytes, w_bytes]
    return rows <= (min(most, LARGEST_UNALIGNED_ROWS) if depth * w_bytes % ALIGNED_BYTES else most)
