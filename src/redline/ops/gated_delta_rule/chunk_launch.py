"""Checks the inputs of the chunked kernels of the gated delta rule and the Titans memory, and launches the kernels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redline.ops import kernel

CHUNKS = (16, 32, 64)
MOST_CHUNKS = 65_535  # the limit of CUDA for the second dimension of a grid


@dataclass(frozen=True)
class Tiles:
    """Block sizes, warps, pipeline stages, and the longest chunk.

    One program of a sequential kernel processes a block of `values` columns of the state over all chunks. Every
    program reads all keys of its head. So small blocks make more programs, and with large blocks the keys are read
    fewer times in total.
    """

    block: int
    warps: int
    values: int
    state_warps: int
    stages: int
    chunk: int = max(CHUNKS)


def why_not(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int, largest_head: int) -> str:
    largest = max(q_BSHK.shape[-1], v_BSHV.shape[-1])
    if largest > largest_head:
        return f"heads may have at most {largest_head} elements, not {largest}"
    if chunk not in CHUNKS:
        return f"unsupported chunk {chunk} (supported: 16, 32, 64)"
    return kernel.why_not(q_BSHK) or kernel.why_not(k_BSHK) or kernel.why_not(v_BSHV)


def why_too_long(q_BSHK: Tensor, longest: int) -> str:
    tokens = q_BSHK.shape[1]
    return f"at most {longest} tokens per call are supported, not {tokens}" if tokens > longest else ""


@dataclass(frozen=True)
class ChunkLaunch:
    """Launches kernels with one program per head and chunk, or (if `sequential`) per head and block of values.

    `states` is the shape of the states, (batch, heads, chunks, keys, values). `options` holds further compile-time
    constants.
    """

    tiles: Tiles
    chunk: int
    tokens: int
    states: tuple[int, int, int, int, int]
    sequential: tuple[Any, ...]
    single_warp: tuple[Any, ...]
    options: dict[str, object]

    def __call__(self, name: Any, *arguments: Tensor | None) -> None:
        batch, heads, chunks, _, values = self.states
        is_sequential = name in self.sequential
        # Heads vary fastest, because the heads of a token are adjacent in memory.
        grid = (batch * heads, -(-values // self.tiles.values) if is_sequential else chunks)
        warps = self.tiles.state_warps if is_sequential else 1 if name in self.single_warp else self.tiles.warps
        stages = self.tiles.stages if is_sequential else 1
        constants = self.constants(name)
        kernel.launch(name, grid, *arguments, self.tokens, heads, **constants, num_warps=warps, num_stages=stages)

    def constants(self, name: Any) -> dict[str, object]:
        """Returns the compile-time constants that the kernel takes."""
        keys, values = self.states[3:]
        known: dict[str, object] = {
            "KEYS": keys,
            "VALUES": values,
            "BLOCK_K": self.tiles.block,
            "BLOCK_V": self.tiles.values if name in self.sequential else self.tiles.block,
            "ALL_KEYS": kernel.padded(keys),
            "C": self.chunk,
            **self.options,
        }
        return {key: value for key, value in known.items() if key in name.arg_names}
