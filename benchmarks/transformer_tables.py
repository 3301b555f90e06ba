"""Writes docs/transformer-results.md from the committed result files of the operators, of training and of decoding.

    python benchmarks/transformer_tables.py            writes it
    python benchmarks/transformer_tables.py --check    exits with 1 when it is stale, and writes nothing

Rows are those of `benchmarks/kernels/*.py`, `train_speed.py` and `decode.py`, under benchmarks/results/MACHINE/kernels
and /text. All arms of one table were timed in the same run.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from redline.files import write_text
from redline.report.markdown import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
PAGE = Path("docs/transformer-results.md")
NONE = "–"
_OURS = "redline"
_ABOUT = ("op", "gpu", "torch", "triton", "copy_tb_per_s", "case", "arm")
_MEASURED = (
    "peak_bytes",
    "relative_error",
    "captured",
    "failure",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "samples",
    "tb_per_s",
    "tflop_per_s",
)

Row = dict[str, Any]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def load(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def cases(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The arms of each case, with a title."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        sizes = ", ".join(f"{key} {value}" for key, value in row.items() if key not in (*_ABOUT, *_MEASURED))
        found.setdefault(f"{row['case']}: {sizes}", []).append(row)
    yield from found.items()


def kernel_section(rows: Sequence[Row]) -> str:
    head = ("case", "arm", "median", "20–80%", "against ours", "share of a copy", "TFLOP/s", "memory", "error")
    lines = []
    for title, arms in cases(rows):
        ours = next((arm for arm in arms if arm["arm"] == _OURS and "median_ms" in arm), None)
        for arm in sorted(arms, key=lambda arm: arm.get("median_ms", float("inf"))):
            name = f"**{escape(arm['arm'])}**" if arm["arm"].startswith(_OURS) else escape(arm["arm"])
            if "median_ms" not in arm:
                lines.append([escape(title), name, escape(arm.get("failure", "not measured"))[:160], *[NONE] * 6])
                continue
            share = arm.get("tb_per_s", 0) / arm["copy_tb_per_s"] if arm.get("copy_tb_per_s") else 0
            name += "" if arm.get("captured", True) else " (not in a graph)"
            lines.append(
                [
                    escape(title),
                    name,
                    f"{arm['median_ms']:.4g} ms",
                    f"{arm['p20_ms']:.4g}–{arm['p80_ms']:.4g}",
                    f"{arm['median_ms'] / ours['median_ms']:.2f}×" if ours else NONE,
                    f"{100 * share:.0f}%" if share else NONE,
                    f"{arm['tflop_per_s']:.0f}" if "tflop_per_s" in arm else NONE,
                    f"{arm['peak_bytes'] / 2**30:.2f} GiB",
                    f"{arm['relative_error']:.1e}",
                ]
            )
    return table(head, lines)


def training_section(rows: Sequence[Row]) -> str:
    head = ("tokens × batch", "arm", "tokens/s", "MFU", "peak memory", "parameters")
    lines = []
    for row in sorted(rows, key=lambda row: (row["length"], -row.get("tokens_per_s", 0))):
        where = f"{row['length']:,} × {row['batch']}"
        if "tokens_per_s" not in row:
            lines.append([where, escape(row["arm"]), escape(row.get("failure", "not measured"))[:160], *[NONE] * 3])
            continue
        lines.append(
            [
                where,
                escape(row["arm"]),
                f"**{row['tokens_per_s']:,.0f}**",
                f"{100 * row['mfu']:.1f}%",
                f"{row['peak_bytes'] / 2**30:.2f} GiB",
                f"{row['parameters'] / 1e6:.0f}M",
            ]
        )
    return table(head, lines)


def decoding_section(rows: Sequence[Row]) -> str:
    head = ("batch", "arm", "ms a token", "tokens/s", "prefill", "logits' error", "parameters")
    lines = []
    for row in sorted(rows, key=lambda row: (row["batch"], row.get("ms_per_token", float("inf")))):
        if "ms_per_token" not in row:
            said = escape(row.get("failure", "not measured"))[:160]
            lines.append([str(row["batch"]), escape(row["arm"]), said, *[NONE] * 4])
            continue
        lines.append(
            [
                str(row["batch"]),
                escape(row["arm"]),
                f"**{row['ms_per_token']:.3f}**",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['prefill_ms']:.1f} ms of {row['prompt']} tokens",
                f"{row['relative_error']:.1e}",
                f"{row['parameters'] / 1e9:.2f}B",
            ]
        )
    return table(head, lines)


def long_section(rows: Sequence[Row]) -> str:
    head = ("tokens", "arm", "held after the text", "peak beyond the weights", "taken in at", "ms a token after it")
    lines = []
    for row in sorted(rows, key=lambda row: (row["length"], row["arm"])):
        where = [f"{row['length']:,}", escape(row["arm"])]
        if "failure" in row:
            lines.append([*where, escape(row["failure"])[:160], *[NONE] * 3])
            continue
        lines.append(
            [
                *where,
                f"{row['state_bytes'] / 2**20:,.1f} MiB",
                f"{row['peak_bytes'] / 2**20:,.1f} MiB",
                f"{row['prefill_tokens_per_s']:,.0f} tokens/s",
                f"{row['ms_per_token']:.3f}",
            ]
        )
    return table(head, lines)


SECTIONS = {
    "long_context": ("Long texts", "benchmarks/long_context.py", long_section),
    "train_speed": ("Training", "benchmarks/train_speed.py", training_section),
    "decode": ("Decoding", "benchmarks/decode.py", decoding_section),
}


def page(root: Path) -> str:
    parts = [
        "<!-- Written by benchmarks/transformer_tables.py from benchmarks/results: add a file there and run it. -->",
        "# Operators, training and decoding, measured",
        "Each table is one run of one script, all arms of a case turn by turn in the same process. `share of a copy` "
        "is the rate of the bytes that must be moved against what copying a large tensor reached in that run; `memory` "
        "is what the call needed beyond its inputs.",
    ]
    paths = [
        path.relative_to(root) for folder in ("kernels", "text") for path in root.glob(f"{RESULTS}/*/{folder}/*.jsonl")
    ]
    for path in sorted(paths, key=lambda path: (path.parts[2], path.parts[3] != "text", path.name)):
        rows = load(root / path)
        if not rows:
            continue
        script = f"benchmarks/kernels/{path.stem}.py"
        # Another run of the same script is NAME-SOMETHING.jsonl.
        heading, script, section = SECTIONS.get(path.stem.partition("-")[0], (f"`{path.stem}`", script, kernel_section))
        link = Path(os.path.relpath(path, PAGE.parent)).as_posix()
        versions = ", ".join(f"{key} {rows[0][key]}" for key in ("torch", "triton") if key in rows[0])
        parts += [
            f"## {heading}",
            f"[{path.name}]({link}) · {rows[0]['gpu']} · {versions} · `python {script} --out {path.name}`",
            section(rows),
        ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/transformer-results.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when it is stale")
    check = parser.parse_args(arguments).check
    text = page(root)
    is_stale = not (root / PAGE).is_file() or (root / PAGE).read_text(encoding="utf-8") != text
    if check and is_stale:
        print(f"{PAGE} is stale: run `python benchmarks/transformer_tables.py`.", file=sys.stderr)
    elif is_stale:
        write_text(root / PAGE, text)
    return 1 if check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
