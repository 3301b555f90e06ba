"""Runs the network under its plan on batches of tiles, and shrinks the batch or the tiles when memory runs out.

The plan is applied when the first tiles arrive, because some of its rungs (optimizations) calibrate on real input. A
plan that lowers the precision is first compared with fp32, but only on two small squares with much detail, because fp32
is slow. If the comparison fails, or a later batch has values that are not finite, a safer precision replaces the lower
one. Whether a batch is finite is checked while the next batches are computed; no result is returned before its check.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError, RedlineError, first_line
from redline.ladder.gate import Gate
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.ladder.rungs.tf32 import strict_fp32
from redline.machine.machine import Machine
from redline.machine.memory import is_out_of_memory
from redline.machine.pinned_copies import PendingCopy, copies_for
from redline.upscale.blend import enlarge_by_tiles, enlarge_each_by_tiles
from redline.upscale.network import Network
from redline.upscale.tiling import TileShape, Tiling, smallest_tile

# Below this PSNR, the effect of a lower precision could be visible.
GATE = Gate("image_psnr", 40.0)
_JUDGED, _JUDGED_PX = 2, 64
# The precision that replaces each precision if it fails; "" is fp32.
_SAFER = {"int8": "bf16", "fp8": "bf16", "fp16": "bf16", "autocast": "bf16", "bf16": ""}
A = TypeVar("A")


@dataclass(frozen=True)
class _Batch:
    """Tiles, their output, and whether the output is finite; the copy of this flag to the host may still be pending."""

    tiles: Tensor
    output: Tensor
    is_finite: PendingCopy


class OutOfMemory(ModelError):
    """Raised if even a single tile of the smallest size does not fit in memory."""


class TileRunner:
    """Upscales tiles (N, 3, H, W) in [0, 1] from any device to (N, 3, scale · H, scale · W) on `device`."""

    def __init__(
        self,
        network: Network,
        plan: Plan,
        device: torch.device | str,
        tiling: Tiling,
        batch: int = 1,
        say: Callable[[str], None] = lambda _text: None,
        streams: int = 1,
    ) -> None:
        for cut in (side for shape in tiling.shapes for side in (shape.rows, shape.columns)):
            if cut.align % network.window:
                needed = f"{network.name} needs tiles that start at multiples of {network.window}"
                raise RedlineError(f"{needed}, not {cut.align}.")
        self.network, self.plan, self.device = network, plan, torch.device(device)
        self.tiling, self.batch = tiling, batch
        self.copies, self._ahead = copies_for(self.device, streams, say), streams
        self.say = say
        self._fast: Callable[[Tensor], Tensor] | None = None
        self._halvings = 0

    def __call__(self, tiles: Tensor) -> Tensor:
        tiles = tiles.to(self.device, non_blocking=True)
        while True:
            try:
                return self._enlarge(tiles)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Called outside of the handler, because the traceback keeps the tensors of the failed attempt alive.
            self.shrink(*tiles.shape[-2:])

    def checked_each(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields results batch by batch, checked to be finite, with as many batches in flight as there are streams.

        Replaces a precision that overflows by a safer one.
        """
        under_way: deque[_Batch] = deque()
        for tiles in batches:
            under_way.append(self._begin(tiles))
            if len(under_way) >= self._ahead:
                yield self._finish(under_way)
        while under_way:
            yield self._finish(under_way)

    def _begin(self, tiles: Tensor) -> _Batch:
        output = self(tiles)
        return _Batch(tiles, output, self.copies.to_host(torch.isfinite(output).all()))

    def _finish(self, under_way: deque[_Batch]) -> Tensor:
        """Returns the result of the oldest batch, after checking that it is finite.

        After an overflow, repeats all batches in flight with a safer precision, so that the results do not depend on
        how many batches had been started before the check.
        """
        while True:
            first = under_way.popleft()
            is_finite = bool(first.is_finite.wait())
            first.is_finite.release()
            if is_finite:
                return first.output
            if not self._use_safer_precision("its output has values that are not finite"):
                raise ModelError(
                    f"the output of {self.network.name} has values that are not finite: its weights may be damaged."
                )
            again = [first.tiles, *(batch.tiles for batch in under_way)]
            under_way.clear()
            under_way.extend(self._begin(tiles) for tiles in again)

    def _enlarge(self, tiles: Tensor) -> Tensor:
        if self._halvings:
            return enlarge_by_tiles(tiles, self._run, self.network.scale, self._inside(*tiles.shape[-2:]), self.batch)
        results = [self._run(tiles[first : first + self.batch]) for first in range(0, len(tiles), self.batch)]
        return torch.cat(results) if len(results) > 1 else results[0]

    def _run(self, tiles: Tensor) -> Tensor:
        """Runs one batch. If the plan is specialized to one shape, a smaller batch is filled up with copies."""
        count = len(tiles)
        if count < self.batch and any(rung.stage >= Stage.COMPILE for rung in self.plan.rungs):
            tiles = tiles.repeat(ceil(self.batch / count), 1, 1, 1)[: self.batch]
        while True:
            try:
                if self._fast is None:
                    self._fast = self._apply(tiles)
                return self._fast(tiles)[:count]
            except RedlineError:
                raise
            except Exception as error:
                # In a lower precision, a third-party network may fail because it mixes its input with another dtype.
                if is_out_of_memory(error) or not self._use_safer_precision(f"it does not run ({first_line(error)})"):
                    raise

    def _apply(self, tiles: Tensor) -> Callable[[Tensor], Tensor]:
        self.network.module.to(self.device)
        while True:
            # Makes the batch contiguous, because the plan is specialized to contiguous batches of this shape.
            shared = not self.plan.rungs  # an empty plan changes nothing, so the weights need no copy
            fast = self.plan.apply(
                self.network.module, samples=tiles.contiguous(), gates=(GATE,), share=shared, check=False
            )
            if not any(name in self.plan for name in _SAFER):
                return fast if "tf32" in self.plan else _without_tf32(fast)
            squares = squares_to_judge(tiles, self.network.window)
            # Compilation and graph capture are left out of this comparison: the squares have another shape than the
            # tiles, so both would have to be repeated.
            plain = Plan.of([rung for rung in self.plan.rungs if rung.stage < Stage.COMPILE])
            judged = (
                fast
                if plain == self.plan
                else plain.apply(self.network.module, samples=squares, gates=(GATE,), check=False)
            )
            with torch.no_grad():
                score = GATE.judge(_without_tf32(self.network.module)(squares), judged(squares))
            if score.passed or not self._use_safer_precision(
                f"its PSNR against fp32 is {score.value:.1f} dB on the first tiles"
            ):
                return fast

    def _use_safer_precision(self, reason: str) -> bool:
        """Replaces the plan's precision by the next safer one. Returns False if it is already fp32."""
        name = next((name for name in _SAFER if name in self.plan), None)
        if name is None:
            return False
        plan, safer = self.plan.without(name), _SAFER[name]
        if safer and (safer in plan or Plan.parse(safer).rungs[0].why_not(Machine.detect(str(self.device)))):
            safer = ""
        self.plan = plan.with_rung(Plan.parse(safer).rungs[0]) if safer else plan
        self._free_model()
        self.say(f"{name} was replaced by {safer or 'fp32'}: {reason}")
        return True

    @property
    def advice(self) -> str:
        """The advice for the user if even one tile does not fit."""
        return "free some memory" if self.device.type == "cpu" else "free some memory, or use --device cpu"

    @property
    def taken_at_once(self) -> tuple[int, int]:
        """The batch size and the number of times that tiles were halved, so that a caller can restore them."""
        return self.batch, self._halvings

    @taken_at_once.setter
    def taken_at_once(self, before: tuple[int, int]) -> None:
        if before != self.taken_at_once:
            self._free_model()
            self.batch, self._halvings = before

    def shrink(self, height: int, width: int) -> None:
        """Halves the batch; at a batch of one, splits tiles of this size into tiles of half the width and height."""
        self._free_model()
        if self.batch > 1:
            self.batch //= 2
            self.say(f"out of memory: continuing with {self.batch} tile{'s' if self.batch > 1 else ''} at a time")
            return
        before = self._inside(height, width)
        self._halvings += 1
        after = self._inside(height, width)
        if after == before:
            raise OutOfMemory(f"out of memory even with one tile of {before}: {self.advice}.")
        self.say(f"out of memory: continuing with tiles of {after}")

    def _inside(self, *sides: int) -> TileShape:
        """Returns the shape of the tiles into which a tile of this size is split after the halvings so far."""
        like = self.tiling.shapes[0].rows
        least = smallest_tile(like.margin, like.ramp, like.align)
        halved = (ceil(side / 2**self._halvings / like.align) * like.align for side in sides)
        return TileShape(*(replace(like, tile=max(side, least)) for side in halved))

    def _free_model(self) -> None:
        """Frees the optimized model and its captured graphs, once they no longer run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._fast = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def squares_to_judge(tiles: Tensor, window: int) -> Tensor:
    """Returns the two most detailed squares of these tiles (N, 3, H, W), about 64 pixels a side."""
    height, width = (min(side, ceil(_JUDGED_PX / window) * window) for side in tiles.shape[-2:])
    across, down = tiles.diff(dim=-1).abs().mean(1), tiles.diff(dim=-2).abs().mean(1)
    # The difference of each pixel from its right and its lower neighbour.
    detail = F.pad(across, (0, 1)) + F.pad(down, (0, 0, 0, 1))
    sums = F.avg_pool2d(detail[:, None], (height, width), stride=(max(height // 2, 1), max(width // 2, 1)))[:, 0]
    squares = []
    for place in sums.flatten().topk(min(_JUDGED, sums.numel())).indices.tolist():
        tile, rest = divmod(place, sums[0].numel())
        top, left = (
            index * max(side // 2, 1) for index, side in zip(divmod(rest, sums.shape[2]), (height, width), strict=True)
        )
        squares.append(tiles[tile, :, top : top + height, left : left + width])
    return torch.stack(squares)


def _without_tf32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(tiles: Tensor) -> Tensor:
        with strict_fp32():
            return function(tiles)

    return run


class WholeImages:
    """Upscales images (B, 3, H, W) in [0, 1] and applies a function to the result (B, 3, scale · H, scale · W).

    The result is on the device, or in main memory after the device ran out of memory. When memory runs out, both the
    upscaling and the function are repeated.
    """

    def __init__(self, tile_runner: TileRunner, wrap: bool = False) -> None:
        self._tile_runner, self._wrap, self._place = tile_runner, wrap, tile_runner.device
        self._can_leave = tile_runner.copies.has_device_memory

    def __call__(self, images: Tensor, finish: Callable[[Tensor], A]) -> A:
        while True:
            try:
                return finish(self._enlarge(images.to(self._place)))
            except Exception as error:
                if not is_out_of_memory(error) and not (isinstance(error, OutOfMemory) and self._can_leave):
                    raise
            # Called outside of the handler, because the traceback keeps the tensors of the failed attempt alive.
            self._make_room(images)

    def _enlarge(self, images: Tensor) -> Tensor:
        tile_runner = self._tile_runner
        shape = tile_runner.tiling.shape_for((images.shape[-1], images.shape[-2]), self._wrap)

        def enlarge_each(batches: Iterable[Tensor]) -> Iterator[Tensor]:
            return (enlarged.to(self._place) for enlarged in tile_runner.checked_each(batches))

        return enlarge_each_by_tiles(
            images, enlarge_each, tile_runner.network.scale, shape, tile_runner.batch, self._wrap
        )

    def _make_room(self, images: Tensor) -> None:
        if not self._can_leave:
            shape = self._tile_runner.tiling.shape_for((images.shape[-1], images.shape[-2]), self._wrap)
            self._tile_runner.shrink(shape.rows.tile, shape.columns.tile)
            return
        self._place, self._can_leave = torch.device("cpu"), False
        self._tile_runner.say("out of memory: from now on, tiles are blended in main memory")
