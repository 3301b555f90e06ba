"""`redline export`: exports a network to ONNX."""

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import AsJson, Scale
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_bytes


def export(
    model: Annotated[str, Argument(help="The model to export: drct.")],
    weights: Annotated[
        Path | None, Option("--weights", "-w", help="A weight file (default: the bundled weights).")
    ] = None,
    scale: Scale = None,
    format: Annotated[str, Option(help="onnx.")] = "onnx",
    tile: Annotated[int, Option(help="Side of the input tiles in pixels.")] = 128,
    out: Annotated[Path | None, Option("--out", "-o", help="The file to write (default: drct-x4.onnx).")] = None,
    int8: Annotated[
        bool, Option("--int8", help="Write an int8 model, calibrated on the images of --calibrate.")
    ] = False,
    calibrate: Annotated[Path | None, Option(help="For --int8: a folder of images like those to upscale.")] = None,
    samples: Annotated[int, Option(help="How many tiles to calibrate on.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Export a network as an ONNX file, which is compared with the network before it is written.

    Example: redline export drct --format onnx --tile 256
    Example: redline export drct --int8 --calibrate photos/ -o drct-int8.onnx
    """
    with uninterrupted_imports():
        from redline.upscale import export as exporting
    if model != "drct":
        raise RedlineError(f"unknown model {model!r}: only drct can be exported.")
    if format != "onnx":
        raise RedlineError(f"unknown format {format!r}: only onnx is supported.")
    if int8 and calibrate is None:
        raise RedlineError("--int8 needs images to calibrate on: give a folder with --calibrate.")
    if calibrate is not None and not int8:
        raise RedlineError("--calibrate is for int8: add --int8, or leave it out.")
    with LiveLine("reading tiles …") as line:

        def show(what: str, done: int, total: int) -> None:
            line.count(what, done, total, "tile") if total else line.update(f"{what} …")

        exported = exporting.export(
            weights, out, scale=scale, tile=tile, calibrate=calibrate, samples=samples, progress=show
        )
    if as_json:
        written = {"path": str(exported.path), "tile": tile, "bytes": exported.bytes}
        print_json({**written, "psnr": exported.score.value, "int8": int8})
        return
    said = f"{format_bytes(exported.bytes)}, {exported.score.value:.1f} dB compared with the network"
    results.print(f"{escape(str(exported.path))}  {said}", soft_wrap=True)
