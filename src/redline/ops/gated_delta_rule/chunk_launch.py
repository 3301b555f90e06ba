"""The launch of the chunked kernels of the gated delta rule and the Titans memory."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redline.ops import kernel


@dataclass(frozen=True)
class ChunkLaunch:
    """Launches kernels with one program per chunk, or per head and block of values for `sequential` kernels.

    `tiles` has `block` and `warps`, and for the sequential kernels `values`, `state_warps` and `stages`. `states` is
    the shape of the states, (batch, heads, chunks, keys, values). `options` holds further compile-time constants.
    """

    tiles: Any
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
