"""Exports a network as an ONNX file for tiles of one size and any batch size, in fp32 or calibrated int8.

The file is compared with the network on tiles that were not used for calibration, and written only if it agrees. Its
metadata has what `redline upscale` needs: scale, window and tile size.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import ModelError, RedlineError, first_line
from redline.files.atomic import write_bytes
from redline.ladder.gate import Gate, Score
from redline.ladder.rewrites.onnx_quantize import calibration_batches, normalized_linears, quantize_static
from redline.ladder.workloads.drct import smooth_images
from redline.quiet import quiet
from redline.upscale.images.colour import to_planes
from redline.upscale.images.source import open_image
from redline.upscale.network import PREFIX, Network, Onnx, find_weights, load_network, providers_for
from redline.upscale.settings import UpscaleSettings
from redline.upscale.tasks import find_tasks
from redline.upscale.tiling import smallest_tile
from redline.video.padding_index import reflected

# The required PSNR: an fp32 file must closely match the network, and the errors of int8 must not be visible.
EXACT = Gate("image_psnr", 70.0)
ROUNDED = Gate("image_psnr", 40.0)

_JUDGED_TILES = 4

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Exported:
    path: Path
    tile: int
    bytes: int
    score: Score


def export(
    weights: str | Path | None = None,
    out: str | Path | None = None,
    *,
    scale: int | None = None,
    tile: int = 128,
    calibrate: str | Path | None = None,
    samples: int = 32,
    progress: Tell = lambda _what, _done, _total: None,
) -> Exported:
    """Exports a network as an ONNX file that `redline.Upscaler` and ONNX Runtime can run.

    Args:
        weights: A weight file or the name of a bundled network; by default the bundled network for `scale`.
        out: The file, `drct-x4.onnx` or similar by default.
        scale: The factor of the bundled network, 4 by default.
        tile: The side length of the tiles that the exported network accepts, in pixels.
        calibrate: A folder of images to calibrate an int8 network on. By default the network is fp32.
        samples: How many tiles to calibrate on.
        progress: Called with the name of the step, the finished tiles and all tiles (0, 0 for a step without tiles).
    """
    out = None if out is None else Path(out)
    if out is not None and out.suffix.lower() != ".onnx":
        raise RedlineError(
            f"cannot write {str(out)!r}: the file name must end in .onnx, by which `redline upscale` recognises it."
        )
    if samples < 1:
        raise RedlineError(f"--samples must be at least 1, not {samples}.")
    network = load_network(None if weights is None else find_weights(weights), scale)
    defaults = UpscaleSettings()
    smallest = smallest_tile(defaults.margin_px, defaults.ramp_px, network.window)
    if tile < smallest:
        raise RedlineError(f"tiles of {tile} are too small for `redline upscale`: use {smallest} or more.")
    target = out or Path(f"drct-x{network.scale}{'-int8' if calibrate else ''}.onnx")
    if calibrate is None:
        return export_onnx(network, target, tile, smooth_images(_JUDGED_TILES, tile), (), progress)
    judged_on = tiles_of(Path(calibrate), tile, _JUDGED_TILES, seed=1)
    calibration = [pixels[None] for pixels in tiles_of(Path(calibrate), tile, samples)]
    return export_onnx(network, target, tile, judged_on, calibration, progress)


def export_onnx(
    network: Network,
    target: Path,
    tile: int,
    judged_on: Tensor,
    calibration: Sequence[Tensor] = (),
    tell: Tell = lambda _what, _done, _total: None,
) -> Exported:
    """Writes the file and returns its size and score; raises `ModelError` if the score is too low.

    `judged_on` and each item of `calibration` are tiles (N, 3, tile, tile) in [0, 1]. Writes int8 if `calibration`
    is not empty. Calls `tell` like `progress` in `export`.
    """
    if tile % network.window:
        raise ModelError(f"the tile must be a multiple of {network.window} for {network.name}, not {tile}.")
    module = network.module.cpu().eval()
    with tempfile.TemporaryDirectory(prefix="redline-export-") as folder:
        path = Path(folder) / "model.onnx"
        tell(f"exporting {network.name} as a graph", 0, 0)
        _export(module, tile, path)
        if calibration:
            rounded = path.with_name("int8.onnx")
            batches = calibration_batches([[tiles] for tiles in calibration], ["tiles"])
            # Convolutions are not quantized: their inputs are sums of many layers, which need more than 256 levels,
            # and their outputs become pixels.
            options = {"symmetric": False, "external": False, "choose": normalized_linears}
            quantize_static(path, rounded, _counted(batches, tell), "minmax", 99.9, **options)
            path = rounded
        data = _with_facts(path, network, tile, "int8" if calibration else "fp32")
        path.write_bytes(data)
        gate = ROUNDED if calibration else EXACT
        tell("comparing the file with the network", 0, 0)
        with torch.no_grad():
            score = gate.judge(module(judged_on), Onnx(path, providers_for("cpu", judged_on.device))(judged_on))
        if not score.passed:
            kind = "in int8" if calibration else "as ONNX"
            raise ModelError(
                f"{network.name} {kind} differs too much from the network: its PSNR is {score.value:.1f} dB, and "
                f"at least {gate.limit:g} dB is required; nothing was written."
            )
    write_bytes(target, data)
    return Exported(target, tile, len(data), score)


def tiles_of(folder: Path, tile: int, count: int, seed: int = 0) -> Tensor:
    """Returns `count` tiles (count, 3, tile, tile) at random positions, spread over the images of the folder."""
    found = find_tasks([folder], folder / "unused", 1)
    images = [task.source for task in found if not task.is_video and not task.problem]
    if not images:
        raise RedlineError(f"no image found in {str(folder)!r}.")
    random = torch.Generator().manual_seed(seed)
    tiles = []
    for index in range(count):
        # Takes tiles from images all over the folder, because folders are often sorted by subject.
        path = images[index * len(images) // count % len(images)]
        with open_image(path, random_access=True) as image:
            top, left = (
                int(torch.randint(0, max(side - tile, 0) + 1, (1,), generator=random))
                for side in (image.height, image.width)
            )
            rows = image.rows(top, min(top + tile, image.height))
        colour = to_planes(rows)[0][:, :, left : left + tile]
        down, right = (reflected(0, tile, side) for side in colour.shape[-2:])
        tiles.append(colour[:, down][:, :, right])
    return torch.stack(tiles)


def _counted(batches: Sequence[dict[str, Any]], tell: Tell) -> Iterator[dict[str, Any]]:
    """Yields the batches and reports progress. A batch counts as done when the caller takes the next one."""
    for done, batch in enumerate(batches):
        tell("calibrating", done, len(batches))
        yield batch
    tell("writing int8 weights", 0, 0)


def _export(module: torch.nn.Module, tile: int, path: Path) -> None:
    example = torch.rand(2, 3, tile, tile)
    try:
        with quiet(), torch.no_grad():
            count = torch.export.Dim("count", min=1, max=1024)
            graph = torch.export.export(module, (example,), dynamic_shapes=({0: count},), strict=False)
            program = torch.onnx.export(
                graph, input_names=["tiles"], output_names=["enlarged"], dynamo=True, verbose=False
            )
            assert program is not None
            program.save(path)
    except Exception as error:  # the exporter raises many types
        raise ModelError(f"the network cannot be exported to ONNX: {first_line(error)}.") from error


def _with_facts(path: Path, network: Network, tile: int, precision: str) -> bytes:
    import onnx

    model: Any = onnx.load(str(path))
    for node in model.graph.node:  # removes stack traces, which contain local paths
        del node.metadata_props[:]
    facts = {key: getattr(network, key) for key in ("scale", "window", "name", "digest")}
    facts |= {"tile": tile, "precision": precision}
    onnx.helper.set_model_props(model, {PREFIX + key: str(value) for key, value in facts.items()})
    return model.SerializeToString()
