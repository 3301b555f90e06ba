"""`redline rungs`: lists the rungs, their options, and the bundled workloads."""

import inspect
import sys
from types import ModuleType
from typing import Annotated

from typer import Argument, Option

from redline.cli.console import plain_table, print_json, results
from redline.cli.options import AsJson
from redline.cli.signals import uninterrupted_imports


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
    data = [
        {
            "name": rung.name,
            "stage": rung.stage.name.lower(),
            "for": [kind for kind in ("inference", "training") if getattr(rung, kind)],
            "summary": rung.summary,
            "excludes": sorted(rung.excludes),
            "options": [
                {"name": o.name, "default": o.default, **{key: o.metadata[key] for key in ("choices", "help")}}
                for o in rung.options()
            ],
        }
        for rung in chosen
    ]
    if as_json:
        print_json(data)
    elif name:
        _print_one(data[0], sys.modules[find_rung(name).__module__])
    else:
        table = plain_table("rung", "stage", "for", "what it does")
        for row in data:
            table.add_row(row["name"], row["stage"], "/".join(row["for"]), row["summary"])
        results.print(table)


def _print_one(row: dict, module: ModuleType) -> None:
    results.print(f"[bold]{row['name']}[/]  {row['stage']}, for {' and '.join(row['for'])}")
    results.print(row["summary"])
    results.print(inspect.getdoc(module) or "", markup=False)
    if row["excludes"]:
        results.print(f"excludes: {', '.join(row['excludes'])}")
    if row["options"]:
        table = plain_table("option", "default", "choices", "meaning")
        for o in row["options"]:
            table.add_row(o["name"], str(o["default"]), ", ".join(map(str, o["choices"])), o["help"])
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
