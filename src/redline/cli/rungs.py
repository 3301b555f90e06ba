"""`redline rungs`: lists the rungs, their options, and the bundled workloads."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from redline.cli.console import plain_table, print_json, results
from redline.cli.options import AsJson
from redline.cli.signals import uninterrupted_imports

if TYPE_CHECKING:
    from redline.ladder.rung import Rung


def rungs(
    name: Annotated[str | None, Argument(help="Show the options of this rung.")] = None,
    workloads: Annotated[bool, Option("--workloads", help="List the bundled workloads instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the rungs of the ladder in their order, or show the options of one.

    Example: redline rungs compile
    """
    with uninterrupted_imports():
        from redline.ladder.rungs import RUNGS, find_rung
    if workloads:
        _workloads(as_json)
        return
    chosen = [find_rung(name)] if name else list(RUNGS.values())
    if as_json:
        print_json([_as_dict(rung) for rung in chosen])
    elif name:
        _print_one(chosen[0])
    else:
        table = plain_table("rung", "stage", "for", "what it does")
        for rung in chosen:
            table.add_row(rung.name, rung.stage.name.lower(), "/".join(_purposes(rung)), rung.summary)
        results.print(table)


def _purposes(rung: type[Rung]) -> list[str]:
    return ["inference"] * rung.inference + ["training"] * rung.training


def _as_dict(rung: type[Rung]) -> dict[str, object]:
    options = [{"name": o.name, "default": o.default, **o.metadata} for o in rung.options()]
    about = {"name": rung.name, "stage": rung.stage.name.lower(), "for": _purposes(rung), "summary": rung.summary}
    return {**about, "excludes": sorted(rung.excludes), "options": options}


def _print_one(rung: type[Rung]) -> None:
    results.print(f"[bold]{rung.name}[/]  {rung.stage.name.lower()}, for {' and '.join(_purposes(rung))}")
    results.print(rung.summary)
    results.print(inspect.getdoc(sys.modules[rung.__module__]) or "", markup=False)
    if rung.excludes:
        results.print(f"excludes: {', '.join(sorted(rung.excludes))}")
    if rung.options():
        table = plain_table("option", "default", "choices", "meaning")
        for o in rung.options():
            table.add_row(o.name, str(o.default), ", ".join(map(str, o.metadata["choices"])), o.metadata["help"])
        results.print(table)


def _workloads(as_json: bool) -> None:
    from redline.ladder.workloads import BUNDLED

    data = [
        {
            "name": name,
            "summary": (inspect.getdoc(function) or "").partition("\n")[0],
            "options": {p.name: p.default for p in inspect.signature(function).parameters.values()},
        }
        for name, function in BUNDLED.items()
    ]
    if as_json:
        print_json(data)
        return
    table = plain_table("workload", "what it is", "options")
    for row in data:
        table.add_row(row["name"], row["summary"], ", ".join(f"{k}={v}" for k, v in row["options"].items()))
    results.print(table)
