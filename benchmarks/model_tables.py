"""Writes docs/transformer-results.md and docs/stream-results.md from the committed result files of models.

    python benchmarks/model_tables.py            writes them
    python benchmarks/model_tables.py --check    exits with 1 if one of them is stale, and writes nothing

The rows come from `benchmarks/kernels/*.py`, `train_speed.py`, `decode.py`, `long_context.py` and `redline bench lsd`,
under benchmarks/results/MACHINE/kernels, /text and /stream. All arms of one table were timed in the same run.
`full_tables.py` writes all tables of all files.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from goals import GOALS, RESULTS, goal_lines

from redline.files.atomic import write_text
from redline.ladder.report.markdown import escape

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMER_PAGE = Path("docs/transformer-results.md")
STREAM_PAGE = Path("docs/stream-results.md")
NONE = "–"
_OURS = "redline"
_ABOUT = ("op", "gpu", "torch", "triton", "copy_tb_per_s", "command", "case", "arm")
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
    """Yields the arms of each case, with a title."""
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


def packing_section(rows: Sequence[Row]) -> str:
    head = ("tokens × batch", "median document", "arm", "useful tokens/s", "padding", "rows for 10,000 documents")
    lines = [
        [
            f"{row['length']:,} × {row['batch']}",
            f"{row['median_document']:,} tokens",
            escape(row["arm"]),
            f"**{row['tokens_per_s']:,.0f}**",
            f"{100 * row['waste']:.1f}%",
            f"{row['sequences']:,}",
        ]
        for row in rows
    ]
    return table(head, lines)


def decoding_section(rows: Sequence[Row]) -> str:
    head = ("batch", "arm", "ms per token", "tokens/s", "prefill", "error of the logits", "parameters")
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
    head = ("tokens", "arm", "state after the text", "peak beyond the weights", "prefill", "ms per token after it")
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


def passkey_section(rows: Sequence[Row]) -> str:
    head = ("tokens", "arm", "keys read back", "asked", "state after the text", "parameters", "trained")
    lines = [
        [
            f"{row['length']:,}",
            escape(row["arm"]),
            f"**{100 * row['accuracy']:.1f}%**",
            f"{row['asked']}",
            f"{row['state_bytes'] / 2**20:,.1f} MiB",
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['training_s'] / 60:.1f} min, {row['steps']} steps at {row['trained_length']:,} tokens",
        ]
        for row in sorted(rows, key=lambda row: (row["length"], row["arm"]))
    ]
    return table(head, lines)


def kernel_summary(root: Path, paths: Sequence[Path]) -> str:
    """Returns one row per op: our time against the fastest other arm, over all cases of its file."""
    lines = []
    for path in paths:
        ratios = []
        for _, arms in cases(load(root / path)):
            times = {arm["arm"]: arm["median_ms"] for arm in arms if "median_ms" in arm}
            others = [time for name, time in times.items() if not name.startswith(_OURS)]
            if _OURS in times and others:
                ratios.append(min(others) / times[_OURS])
        link = f"[`{path.stem}`]({Path(os.path.relpath(path, TRANSFORMER_PAGE.parent)).as_posix()})"
        if ratios:
            behind = sum(ratio < 0.99 for ratio in ratios)
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}×"
            lines.append([link, str(len(ratios)), f"**{median(ratios):.2f}×**", spread, str(behind)])
    return table(("op", "cases", "speed over the best other, median", "range", "cases more than 1% behind"), lines)


SECTIONS = {
    "long_context": ("Long contexts", "benchmarks/long_context.py", long_section),
    "passkey": ("Passkeys", "", passkey_section),
    "train_speed": ("Training", "benchmarks/train_speed.py", training_section),
    "decode": ("Decoding", "benchmarks/decode.py", decoding_section),
    "packing": ("Packing against padding", "", packing_section),
}


def live_section(rows: Sequence[Row]) -> str:
    head = (
        "size",
        "frame size",
        "steps",
        "arm",
        "model",
        "frames/s",
        "× fp32",
        "× plain loop",
        "p50",
        "p99",
        "peak memory",
        "peak in set-up",
        "PSNR to fp32",
    )
    lines = []
    for row in rows:
        shape, arm = row["shape"], row["arm"]
        size = f"{shape['size']}, shipped" if shape.get("weights") == "shipped" else shape["size"]
        frame_size = f"{shape['side']}×{shape['side']}" + (" of a video" if shape.get("video") else "")
        start = [size, frame_size, str(shape["steps"]), escape(arm["name"])]
        if row["failure"]:
            lines.append([*start, escape(row["failure"])[:160], *[NONE] * 8])
            continue
        of_this = [other for other in rows if other["shape"] == shape and not other["failure"]]
        plain = next((other for other in of_this if other["arm"]["name"] == "fp32"), None)
        loop = next((other for other in of_this if not other["arm"].get("overlapped", True)), None)
        ratios = [f"{row['frames_per_s'] / than['frames_per_s']:.2f}" if than else NONE for than in (plain, loop)]
        least, mean = row["least_psnr_db"], row["mean_psnr_db"]
        lines.append(
            [
                *start,
                f"{row['model_ms']:.3g} ms",
                f"**{row['frames_per_s']:,.0f}**",
                *ratios,
                f"{row['p50_ms']:.3g} ms",
                f"{row['p99_ms']:.3g} ms",
                f"{row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else NONE,
                f"{row['setup_peak_bytes'] / 2**30:.2f} GiB" if row["setup_peak_bytes"] else NONE,
                f"{mean:.1f} dB, least {least:.1f}" if least is not None else NONE,
            ]
        )
    return table(head, lines)


def video_section(rows: Sequence[Row]) -> str:
    """Returns the table of `redline stream VIDEO null --json`: throughput, latency and the time of each stage."""
    stages = ("capture", "wait", "copy_in", "compute", "copy_out", "display")
    figures = ("frames/s", "p50", "p99", "memory", f"p50 of {', '.join(stages)}")
    head = ("video", "model", "size", "settings", "plan", *figures)
    lines = []
    for row in rows:
        report = row["report"]
        lines.append(
            [
                f"`{row['video']}`" if "video" in row else escape(row["source"]),
                row["model"],
                row["size"],
                row["settings"],
                f"`{row['plan']}`",
                f"**{report['frames_per_s']:,.0f}**",
                *(f"{1e3 * report['latency'][name]:.3g} ms" for name in ("p50_s", "p99_s")),
                f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
                ", ".join(f"{1e3 * report['stages'][stage]['p50_s']:.2g}" for stage in stages) + " ms",
            ]
        )
    return table(head, lines)


def live_training_section(rows: Sequence[Row]) -> str:
    head = ("size", "clips", "stage", "optimizer", "checkpointing", "teacher", "peak memory", "time per step")
    lines = []
    for row in rows:
        start = [row["size"], f"{row['batch']} of {row['frame_px']}×{row['frame_px']}", row["stage"], row["optimizer"]]
        start.append("yes" if row["checkpointing"] else "no")
        if "failure" in row:
            lines.append([*start, NONE, escape(row["failure"])[:160], NONE])
            continue
        teacher = "yes" if row["has_teacher"] else "no"
        lines.append([*start, teacher, f"**{row['peak_bytes'] / 2**30:.2f} GiB**", f"{row['step_ms']:.0f} ms"])
    return table(head, lines)


SECTIONS["lsd_training"] = ("Training the live model", "benchmarks/lsd_training.py", live_training_section)
SECTIONS["lsd"] = ("The live model", "", live_section)
SECTIONS["video"] = ("A video without an output", "", video_section)
_WRITTEN = "<!-- Written by benchmarks/model_tables.py from benchmarks/results: add a file there and run it. -->"


def transformer_page(root: Path) -> str:
    """Returns what was asked for beside what was measured, the main tables, and one row per op."""
    about = (
        "Each table is one run of one script; all arms of a case take turns in the same process, unless it names "
        "several commands. A run that was stopped by a time limit shows the cases it reached. `make tables` writes all "
        "tables of all result files, with every case of every op, as HTML."
    )
    parts = [_WRITTEN, "# Operators, training and decoding, measured", about]
    if (root / GOALS).is_file():
        goals = table(("on one NVIDIA H200", "goal", "measured", "from"), goal_lines(root))
        parts += ["## What was asked for", goals]
    kernels = [path for path in _result_files(root, ("kernels",)) if "-" not in path.stem]
    if kernels:
        about_ops = (
            "Forward and forward with backward, small and large shapes, on one NVIDIA H200. The best other arm is the "
            "fastest of eager PyTorch, `torch.compile`, Liger, cuDNN and what else the op's file names."
        )
        parts += ["## Operators", about_ops, kernel_summary(root, kernels)]
    parts += _sections(root, [path for path in _result_files(root, ("text",)) if "-" not in path.stem])
    return "\n\n".join(parts) + "\n"


def full_page(root: Path) -> str:
    """Returns every table of every result file of models, as Markdown."""
    about = (
        "`share of a copy` is the rate of the bytes that must be moved, relative to copying a large tensor in the same "
        "run; more than 100% is possible for a call that mostly reads. `memory` is what the call needs beyond "
        "its inputs."
    )
    parts = ["# All tables of models", about]
    return "\n\n".join(parts + _sections(root, _result_files(root, ("text", "kernels", "stream")))) + "\n"


def stream_page(root: Path) -> str:
    about = (
        "The live model as a stream runs it, from frames in main memory to finished frames there; "
        "[`redline bench lsd`](commands/bench.md#the-live-model) explains each column. Weights are random where none "
        "are named: PSNR shows how far the arithmetic changes a frame, not how good the frame is. On a GPU a stream "
        "uses `bf16 + channels_last` and a CUDA graph by default; the fastest plan there is "
        '`--plan "fp16 + channels_last + compile"`.'
    )
    parts = [_WRITTEN, "# Live video, measured", about, *_sections(root, _result_files(root, ("stream",)))]
    return "\n\n".join(parts if len(parts) > 3 else [*parts, "Nothing is measured yet."]) + "\n"


def _result_files(root: Path, folders: Sequence[str]) -> list[Path]:
    """Returns paths below the root, sorted by machine, then folder, then name."""
    paths = [path.relative_to(root) for folder in folders for path in root.glob(f"{RESULTS}/*/{folder}/*.jsonl")]
    return sorted(paths, key=lambda path: (path.parts[2], folders.index(path.parts[3]), path.name))


def _sections(root: Path, paths: Sequence[Path]) -> list[str]:
    parts = []
    for path in paths:
        rows = load(root / path)
        if not rows:
            continue
        # NAME-SUFFIX.jsonl is another run of the same script.
        name, dash, kind = path.stem.partition("-")
        usual = (f"`{name}`", f"benchmarks/kernels/{name}.py", kernel_section)
        heading, script, section = SECTIONS.get(name, usual)
        heading += f": {kind}" if dash else ""
        link = Path(os.path.relpath(path, STREAM_PAGE.parent)).as_posix()
        versions = ", ".join(f"{key} {rows[0][key]}" for key in ("torch", "triton") if key in rows[0])
        where = f" in {Path(script).parent}" if script else ""
        commands = " · ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))
        parts += [
            f"## {heading}",
            f"[{path.name}]({link}) · {rows[0]['gpu']} · {versions} · {commands}{where}",
            section(rows),
        ]
    return parts


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes the pages of results of models.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if one is stale")
    check = parser.parse_args(arguments).check
    pages = {TRANSFORMER_PAGE: transformer_page(root), STREAM_PAGE: stream_page(root)}
    stale = [p for p, text in pages.items() if not (root / p).is_file() or (root / p).read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is stale: run `python benchmarks/model_tables.py`.", file=sys.stderr)
        else:
            write_text(root / path, pages[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
