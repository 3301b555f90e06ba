"""Climbs the workloads that the README reports and writes result files.

    python benchmarks/climb_all.py --out results                      all workloads, at most ten minutes each
    python benchmarks/climb_all.py vit unet_880m --budget 5m --out results

Writes OUT/NAME.jsonl (OUT/NAME-OBJECTIVE.jsonl unless the objective is latency) only if the climb finished its final
race; `benchmarks/tables.py` generates the tables.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from redline import RedlineError, climb
from redline.files.atomic import write_text
from redline.ladder.objective import Objective

# Larger shapes than the workloads' defaults are for GPUs.
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "resnet": ("resnet", {}),
    "vit": ("vit", {}),
    "unet_100m": ("unet_100m", {}),
    "unet_390m": ("unet_390m", {}),
    "unet_880m": ("unet_880m", {}),
    "gpt": ("gpt", {}),
    "gpt_124m": ("gpt_124m", {}),
    "llama": ("examples/transformers_model.py:llama", {"width": 1024, "layers": 12, "length": 512}),
    # For the guides' inference table: a forward pass over 2,048 tokens, starting from unfused attention.
    "llama_2048": (
        "examples/transformers_model.py:llama",
        {"width": 768, "layers": 12, "length": 2048, "vocabulary": 32_000, "written_out": 1},
    ),
    "timm_resnet50": ("examples/timm_model.py:resnet50", {"batch": 8}),
    "drct_l": ("drct_l", {}),
    # A tile size that takes a CPU about a second.
    "drct_64": ("drct", {"size": 64}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Climbs the workloads that the README reports.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"from {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--budget", default="10m", help="time for one climb")
    parser.add_argument("--timeout", default="2m", help="time limit of one trial")
    parser.add_argument("--sampling", default="3s", help="time for the turns of one comparison")
    parser.add_argument("--without", action="append", default=[], metavar="RUNG", help="exclude this rung; repeatable")
    parser.add_argument("--objective", default="latency", choices=list(Objective), help="what the climbs minimize")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.names or WORKLOADS:
        if name not in WORKLOADS:
            parser.error(f"unknown workload {name!r}")
        address, shape = WORKLOADS[name]
        label = ",".join(f"{key}={value}" for key, value in shape.items())
        with tempfile.TemporaryDirectory() as folder:
            try:
                climbed = climb(
                    address,
                    objective=arguments.objective,
                    shapes={label: shape},
                    budget=arguments.budget,
                    timeout=arguments.timeout,
                    sampling=arguments.sampling,
                    without=arguments.without,
                    out=folder,
                    progress=lambda text, row: print(f"  {text}", row.reason if row else "", flush=True),
                )
            except RedlineError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = True
                continue
            suffix = "" if arguments.objective == "latency" else f"-{arguments.objective}"
            write_text(
                arguments.out / f"{name}{suffix}.jsonl", climbed.files["measurements"].read_text(encoding="utf-8")
            )
            print(f"{name}: {climbed.plan}: {climbed.measurements[-1].reason}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
