"""`redline doctor`: shows what this machine supports, its measured ceilings, and the rungs that can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from typer import Option

from redline.cli.console import plain_table, print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import AsJson, Device
from redline.cli.signals import uninterrupted_imports
from redline.machine.gpu_classes import why_unmeasured
from redline.notation import format_bytes, format_rate

if TYPE_CHECKING:
    from redline.machine.machine import Machine


def doctor(
    device: Device = "auto",
    again: Annotated[bool, Option("--again", help="Measure the ceilings again instead of using the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine supports: dtypes, kernels, measured ceilings, and which rungs can run.

    Example: redline doctor --json | jq .ceilings
    """
    with uninterrupted_imports():
        from redline import doctor as examine
    with LiveLine("starting …") as line:
        diagnosis = examine(device, again=again, progress=lambda text: line.update(f"{text} …"))
    if as_json:
        print_json(diagnosis.as_dict())
        return
    _print_machine(diagnosis.machine)
    results.print(f"\n[bold]precision[/]  start from [bold]{diagnosis.precision}[/]: {diagnosis.precision_reason}")
    table = plain_table("rung", "here", "why not")
    for name, reason in diagnosis.why_not.items():
        table.add_row(name, "[green]available[/]" if not reason else "[dim]no[/]", escape(reason))
    results.print()
    results.print(table)
    results.print("\nNext: [bold]redline climb resnet[/], or your own model: redline climb file.py:function")


def _print_machine(machine: Machine) -> None:
    table = plain_table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    count = f" (1 of {machine.device_count})" if machine.device_count > 1 else ""
    table.add_row("device", f"{machine.name}, {machine.device}{count}")
    memory = format_bytes(machine.host_bytes)
    if machine.is_cuda:
        major, minor = machine.capability
        table.add_row("", f"compute capability {major}.{minor}, driver {machine.driver}, CUDA {machine.cuda}")
        measured = why_unmeasured(machine.capability) or "measured on this class of GPU"
        table.add_row("", f"the shipped plans and the tiles of the kernels: {measured}")
        memory = f"{format_bytes(machine.device_bytes)} on the device, {memory} host"
    table.add_row("memory", memory)
    table.add_row("cores", str(machine.cores))
    table.add_row("system", f"{machine.system}, Python {machine.python}")
    table.add_row("libraries", ", ".join(f"{k} {v}" for k, v in machine.versions.items()))
    table.add_row("features", ", ".join(machine.features) or "none known")
    table.add_row("hardware dtypes", ", ".join(machine.hardware_dtypes))
    table.add_row("attention kernels", ", ".join(machine.attention_kernels))
    if (ceilings := machine.ceilings) is not None:
        table.add_row("copy", f"{format_rate(ceilings.bytes_per_s, 'B/s')} (read + write)")
        kinds = (("matmul", ceilings.matmul_flops_per_s), ("convolution", ceilings.convolution_flops_per_s))
        for kind, rates in kinds:
            table.add_row(kind, ", ".join(f"{d} {format_rate(r, 'FLOP/s')}" for d, r in rates.items()))
    results.print(table)
