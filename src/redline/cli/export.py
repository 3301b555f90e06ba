"""`redline export`: a network as a file that other programs run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from redline.cli.console import print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_bytes

_JUDGED_ON = 4


def export(
    model: Annotated[str, typer.Argument(help="What to export: drct.")],
    weights: Annotated[Path | None, typer.Option("--weights", "-w", help="A weight file; shipped by default.")] = None,
    scale: Annotated[
        int | None, typer.Option("--scale", "-s", help="Of the shipped weights, 4 by default; others know theirs.")
    ] = None,
    format: Annotated[str, typer.Option(help="onnx.")] = "onnx",
    tile: Annotated[int, typer.Option(help="The side of the tiles that the file will take.")] = 128,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file .onnx; drct-x4.onnx by default.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="In int8, calibrated on the images of --calibrate.")] = False,
    calibrate: Annotated[Path | None, typer.Option(help="For int8: a folder of images like those to come.")] = None,
    samples: Annotated[int, typer.Option(help="Tiles to calibrate on.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a network as an ONNX file, held against the network itself before it is kept.

    Example: redline export drct --format onnx --tile 256
    Example: redline export drct --int8 --calibrate photos/ -o drct-int8.onnx
    """
    with uninterrupted_imports():
        from redline.ladder.workloads.drct import smooth_images
        from redline.upscale.export import export_onnx
        from redline.upscale.image_tiles import tiles_of
        from redline.upscale.network import load_network
        from redline.upscale.settings import UpscaleSettings
        from redline.upscale.tiling import smallest_tile
    if model != "drct":
        raise RedlineError(f"{model!r} cannot be exported: drct can.")
    if format != "onnx":
        raise RedlineError(f"unknown format {format!r}: onnx is the one there is.")
    if int8 and calibrate is None:
        raise RedlineError("int8 is calibrated on images: name a folder with --calibrate.")
    if calibrate is not None and not int8:
        raise RedlineError("only int8 is calibrated: add --int8, or leave out --calibrate.")
    if out is not None and out.suffix.lower() != ".onnx":
        raise RedlineError(
            f"cannot write {str(out)!r}: the file's name ends in .onnx, by which `redline upscale` knows it."
        )
    if samples < 1:
        raise RedlineError(f"it takes at least one tile to calibrate on, not {samples}.")
    network = load_network(weights, scale)
    usual = UpscaleSettings()
    least = smallest_tile(usual.margin_px, usual.ramp_px, network.window)
    if tile < least:
        raise RedlineError(f"tiles of {tile} are too small for `redline upscale`: take {least} or more.")
    target = out or Path(f"drct-x{network.scale}{'-int8' if int8 else ''}.onnx")
    with LiveLine("reading tiles …") as line:
        if calibrate is None:
            judged_on, calibration = smooth_images(_JUDGED_ON, tile), []
        else:
            judged_on = tiles_of(calibrate, tile, _JUDGED_ON, seed=1)
            calibration = [pixels[None] for pixels in tiles_of(calibrate, tile, samples)]

        def tell(what: str, done: int, total: int) -> None:
            line.count(what, done, total, "tile") if total else line.update(f"{what} …")

        exported = export_onnx(network, target, tile, judged_on, calibration, tell)
    if as_json:
        print_json(
            {
                "path": str(exported.path),
                "tile": tile,
                "bytes": exported.bytes,
                "psnr": exported.score.value,
                "int8": int8,
            }
        )
        return
    said = f"{format_bytes(exported.bytes)}, {exported.score.value:.1f} dB from the network itself"
    results.print(f"{escape(str(exported.path))}  {said}", highlight=False, soft_wrap=True)
