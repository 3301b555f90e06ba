"""`redline profile`: shows the time and memory of a step by layer."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from rich.table import Table
from typer import Option

from redline.cli.console import plain_table, print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, Device, Page, Workload, WorkloadOptions, parse_workload_options
from redline.cli.signals import uninterrupted_imports
from redline.notation import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from redline.ladder.profile import Attention, LayerTimes, Memory, Profile
    from redline.ladder.profile.kernels import KernelTime


def profile(
    workload: Workload,
    layers: Annotated[bool, Option("--layers", help="Measure the time per layer.")] = False,
    memory: Annotated[bool, Option("--memory", help="Measure the memory per layer.")] = False,
    attention: Annotated[
        bool, Option("--attention", help="Measure the share of time in attention; list its kernels.")
    ] = False,
    trace: Annotated[Path | None, Option(help="Write a Chrome trace to this file (.json or .json.gz).")] = None,
    nvtx: Annotated[bool, Option("--nvtx", help="Add NVTX ranges for nsys and ncu to one step (CUDA).")] = False,
    page: Page = None,
    plan: Annotated[str, Option(help=PLAN_HELP)] = "eager",
    device: Device = "auto",
    shape: WorkloadOptions = None,
    top: Annotated[int, Option(min=1, help="Maximum number of rows per table.")] = 10,
    repeats: Annotated[int, Option(min=1, help="Number of timed steps; the median is reported.")] = 7,
    as_json: Annotated[bool, Option("--json", help="Print the whole profile as JSON.")] = False,
) -> None:
    """Show the time and memory of a step, layer by layer.

    Without --layers, --memory, --attention, --trace or --nvtx, shows layers and memory.

    Example: redline profile mine.py:model --layers --attention --page profile.html
    """
    with uninterrupted_imports():
        from redline import profile as measure
    chosen = layers or memory or attention or trace is not None or nvtx
    # Output of the user's code goes to stderr, so that stdout contains only the result.
    with redirect_stdout(sys.stderr), LiveLine("starting …") as line:
        seen = measure(
            workload,
            plan,
            options=parse_workload_options(shape),
            layers=layers or not chosen,
            memory=memory or not chosen,
            attention=attention,
            trace=trace,
            nvtx=nvtx,
            repeats=repeats,
            page=page,
            top=top,
            device=device,
            progress=lambda text: line.update(f"{text} …"),
        )
    if as_json:
        print_json(seen.as_dict())
    else:
        print_profile(seen, top)
    for kind, path in (("trace", trace), ("page", page)):
        if path is not None:
            progress.print(f"{kind} written to {escape(str(path))}", soft_wrap=True)


def print_profile(seen: Profile, top: int) -> None:
    kind = "training step" if seen.training else "inference"
    facts = (kind, f"plan {escape(seen.plan)}", escape(seen.machine), f"{format_seconds(seen.step_s)} a step")
    results.print(f"[bold]{escape(seen.workload)}[/] · {' · '.join(facts)}")
    if seen.layers is not None:
        _print_layers(seen.layers, top, seen.training)
    if seen.kernels:
        _print_kernels(seen.kernels, top, seen.device)
    if seen.memory is not None:
        _print_memory(seen.memory, top)
    if seen.attention is not None:
        _print_attention(seen.attention)
    for note in seen.notes:
        results.print(f"[yellow]note:[/] {escape(note)}")
    if seen.deeper is not None:
        results.print("\n[bold]To go deeper[/]")
        for command in (seen.deeper.nsys, seen.deeper.ncu):
            results.print(escape(command), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = plain_table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        words = column in ("layer", "type", "name", "what", "kernel")
        table.add_column(column, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def _show(table: Table) -> None:
    results.print()
    results.print(table)


def _name(name: str, kind: str) -> str:
    """Returns the name of a layer with its class, if it has one: the loss, for example, has no class."""
    return escape(name or "(model)") + ("" if kind == name else f" [dim]{escape(kind)}[/]")


def _print_layers(times: LayerTimes, top: int, training: bool) -> None:
    backward = ("backward",) if training else ()
    ceiling = ("ceiling",) if times.ceiling_flops_per_s else ()
    columns = ("layer", "self", *backward, "share", "with inner", "FLOPs", *ceiling)
    table = _table(f"Time by layer, the {top} largest", *columns)
    for layer in times.largest(top):
        cells = [_name(layer.name, layer.type), format_seconds(layer.self_s)]
        if training:
            cells.append(format_seconds(layer.backward_self_s))
        cells += [f"{times.share(layer.self_s):.1%}", format_seconds(layer.total_s)]
        cells.append(format_rate(layer.flops, "FLOP") if layer.flops else "")
        if ceiling:
            cells.append(f"{times.of_ceiling(layer):.1%}" if layer.flops else "")
        table.add_row(*cells)
    _show(table)
    table = _table("Time by type", "type", "layers", "self", "share", "FLOPs")
    for kind in times.by_type()[:top]:
        flops = format_rate(kind.flops, "FLOP") if kind.flops else ""
        table.add_row(escape(kind.type), str(kind.layers), format_seconds(kind.self_s),
                      f"{times.share(kind.self_s):.1%}", flops)  # fmt: skip
    _show(table)
    results.print(times.measuring_cost)


def _print_kernels(kernels: tuple[KernelTime, ...], top: int, device: str) -> None:
    what = "Kernels" if device.startswith("cuda") else "Operators"
    table = _table(f"{what}, the {top} largest", "name", "calls", "time", "share")
    for kernel in kernels[:top]:
        table.add_row(escape(kernel.name[:100]), f"{kernel.calls:g}", format_seconds(kernel.seconds),
                      f"{kernel.share:.1%}")  # fmt: skip
    _show(table)


def _print_memory(memory: Memory, top: int) -> None:
    largest = memory.largest(top)
    fields = ("weight_bytes", "activation_bytes", "gradient_bytes", "optimizer_bytes", "at_peak_bytes")
    titles = ("weights", "activations", "gradients", "optimizer", "at peak")
    # Leaves out empty columns: inference has no gradients, and a compiled model shows no activations.
    shown = [field for field in fields if any(getattr(layer, field) for layer in largest)]
    columns = [title for title, field in zip(titles, fields, strict=True) if field in shown]
    table = _table(f"Memory by layer, the {top} largest", "layer", *columns)
    for layer in largest:
        sizes = [getattr(layer, field) for field in shown]
        table.add_row(_name(layer.name, layer.type), *(format_bytes(size) if size else "" for size in sizes))
    _show(table)
    table = _table("Memory in total", "what", "bytes")
    for what, size in memory.totals:
        table.add_row(escape(what), format_bytes(size))
    _show(table)


def _print_attention(attention: Attention) -> None:
    if not attention.layers and not attention.kernels:
        results.print("\n[bold]Attention[/]: none found.")
        return
    core = f", its core {attention.core_share:.1%}" if attention.core_share is not None else ""
    kernels = escape(", ".join(attention.kernels))
    results.print(f"\n[bold]Attention[/]: {attention.share:.1%} of the step{core}; ran as {kernels}.")
    if attention.layers:
        table = _table("Attention by layer", "layer", "kernel", "calls", "with inner", "core")
        for layer in attention.layers:
            table.add_row(_name(layer.name, layer.type), layer.kernel, str(layer.calls),
                          format_seconds(layer.total_s), format_seconds(layer.core_s))  # fmt: skip
        _show(table)
    results.print(f"Counted as attention: {attention.counted}.")
