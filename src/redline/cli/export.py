"""`redline export`: exports an optimized model as an artifact that loads in seconds, or DRCT as an ONNX file."""

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import print_json, results, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.options import WORKLOAD_HELP, AsJson, Device, WorkloadOptions, parse_workload_options
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_bytes, format_seconds

_DRCT = "Options of `redline export drct`"


def export(
    plan: Annotated[
        str, Argument(help="A plan file, or a plan in one line: 'bf16 + compile'. Or drct, without a workload.")
    ],
    workload: Annotated[str | None, Argument(help=WORKLOAD_HELP)] = None,
    out: Annotated[
        str | None,
        Option(
            "--out",
            "-o",
            help="model.pt2 (AOTInductor package), model.onnx (ONNX Runtime), or a name without a suffix (a folder).",
        ),
    ] = None,
    shape: WorkloadOptions = None,
    device: Device = "auto",
    weights: Annotated[
        Path | None,
        Option("--weights", "-w", help="A weight file (default: the bundled weights).", rich_help_panel=_DRCT),
    ] = None,
    scale: Annotated[
        int | None,
        Option(
            "--scale",
            "-s",
            help="Upscaling factor (default: the factor of the weights, or 4).",
            rich_help_panel=_DRCT,
        ),
    ] = None,
    format: Annotated[str | None, Option(help="onnx.", rich_help_panel=_DRCT)] = None,
    tile: Annotated[
        int | None, Option(help="Side of the input tiles in pixels (default: 128).", rich_help_panel=_DRCT)
    ] = None,
    int8: Annotated[
        bool,
        Option("--int8", help="Write an int8 model, calibrated on the images of --calibrate.", rich_help_panel=_DRCT),
    ] = False,
    calibrate: Annotated[
        Path | None, Option(help="For --int8: a folder of images like those to upscale.", rich_help_panel=_DRCT)
    ] = None,
    samples: Annotated[
        int | None, Option(help="How many tiles to calibrate on (default: 32).", rich_help_panel=_DRCT)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a model with its plan as a file or folder that loads in seconds, checked before it is written.

    The name in --out decides the form. An AOTInductor package (.pt2) has the compiled kernels and the weights, and
    needs neither the compiler nor the model's code. An ONNX file (.onnx) runs in ONNX Runtime. A folder has weights,
    plan and compiled code; it holds other rungs too, and needs the model's code. `redline.load_exported(path)` loads
    all three.

    The artifact is loaded in a new process, and the gates of the workload are checked on its outputs.

    Example: redline export redline-out/resnet/plan.toml resnet --out resnet.pt2
    Example: redline export 'fold_batchnorm + onnxruntime(int8=static)' resnet --shape batch=1 -o resnet.onnx
    Example: redline export 'fold_batchnorm + compile' mine.py:model -o served/
    Example: redline export drct --tile 256 -o drct-x4.onnx
    Example: redline export drct --int8 --calibrate photos/ -o drct-int8.onnx
    """
    own = {
        "--weights": weights,
        "--scale": scale,
        "--format": format,
        "--tile": tile,
        "--int8": int8 or None,
        "--calibrate": calibrate,
        "--samples": samples,
    }
    given = [name for name, value in own.items() if value is not None]
    if workload is None:
        if plan != "drct":
            raise RedlineError(
                f"what should {plan!r} be applied to? Write redline export PLAN WORKLOAD --out model.pt2, or "
                "redline export drct."
            )
        if shape:
            raise RedlineError("--shape is for a workload: use --tile for the size of drct's tiles.")
        _export_drct(weights, scale, format, tile, int8, calibrate, samples, out, as_json)
        return
    if given:
        raise RedlineError(f"{given[0]} is for `redline export drct`, without a workload.")
    if out is None:
        raise RedlineError("name the artifact with --out: model.pt2, model.onnx, or a folder.")
    with uninterrupted_imports():
        from redline import export as export_plan
    with warnings_as_sentences(), LiveLine("starting …") as line:
        made = export_plan(
            plan,
            workload,
            out,
            options=parse_workload_options(shape),
            device=device,
            progress=lambda text, _: line.update(f"{text} …"),
        )
    if as_json:
        print_json({"path": str(made.path), "bytes": made.bytes, **made.manifest.as_dict()})
        return
    said = f"{format_bytes(made.bytes)}, loads in {format_seconds(made.load_s)} (new process, until the first output)"
    results.print(f"{escape(str(made.path))}  {said}", soft_wrap=True)
    for score in made.manifest.scores:
        results.print(escape(str(score)))


def _export_drct(
    weights: Path | None,
    scale: int | None,
    format: str | None,
    tile: int | None,
    int8: bool,
    calibrate: Path | None,
    samples: int | None,
    out: str | None,
    as_json: bool,
) -> None:
    with uninterrupted_imports():
        from redline.upscale import export as exporting
    tile = 128 if tile is None else tile
    if format not in (None, "onnx"):
        raise RedlineError(f"unknown format {format!r}: only onnx is supported.")
    if int8 and calibrate is None:
        raise RedlineError("--int8 needs images to calibrate on: give a folder with --calibrate.")
    if calibrate is not None and not int8:
        raise RedlineError("--calibrate is for int8: add --int8, or leave it out.")
    with LiveLine("reading tiles …") as line:

        def show(what: str, done: int, total: int) -> None:
            line.count(what, done, total, "tile") if total else line.update(f"{what} …")

        exported = exporting.export(
            weights,
            out,
            scale=scale,
            tile=tile,
            calibrate=calibrate,
            samples=32 if samples is None else samples,
            progress=show,
        )
    if as_json:
        written = {"path": str(exported.path), "tile": tile, "bytes": exported.bytes}
        print_json({**written, "psnr": exported.score.value, "int8": int8})
        return
    said = f"{format_bytes(exported.bytes)}, {exported.score.value:.1f} dB compared with the network"
    results.print(f"{escape(str(exported.path))}  {said}", soft_wrap=True)
