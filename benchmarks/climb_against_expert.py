"""Times the plan that a climb finds against what an engineer types by hand, interleaved in one process.

    python benchmarks/climb_against_expert.py --out expert.jsonl --budget 120s            all models for this device
    python benchmarks/climb_against_expert.py --out expert.jsonl bert swin_base=400s      these, with a budget each
    python benchmarks/climb_against_expert.py --out expert.jsonl --neighbours 2           beside two busy processes

By hand: on a GPU bf16 and fp16, with and without channels_last, each with torch.compile(mode="reduce-overhead"); on a
CPU eager, torch.compile and ONNX Runtime. None of them uses Redline, and each gets the budget for its set-up. OUT gets
a line per model; models that it has with the same budget are left out, so an interrupted run continues.
"""

import argparse
import copy
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline import Plan, Workload, climb
from redline.errors import RedlineError
from redline.ladder.statistics import median, ratio_interval
from redline.ladder.workload import call
from redline.notation import parse_seconds

MODELS = {
    "cuda": (
        "bert", "vit_large", "convnext_base", "swin_base", "resnet50", "llama_prefill", "whisper_encoder", "sd_unet",
        "gpt2_training",
    ),
    "cpu": ("mobilenet_v3", "convnext_tiny", "vit_tiny", "distilbert", "t5_encoder", "lstm", "encoder"),
}  # fmt: skip
# A plan may be this much slower than the best by hand, at the upper end of the interval.
NEVER_BELOW = 0.98
# The comparison ends after this time, with at least so many turns.
_LONGEST_S, _LEAST_TURNS = 60.0, 12
Call = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Times climbed plans against hand-written variants.")
    parser.add_argument("models", nargs="*", metavar="MODEL[=BUDGET]", help=f"default: all of {MODELS}")
    parser.add_argument("--budget", default="120s", help="time for one climb")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside the climb and the comparison")
    parser.add_argument("--turns", type=int, default=60, help="turns of the comparison")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.compare is not None:
        (name,) = arguments.models
        print(json.dumps(compare(name, device, Plan.load(arguments.compare), arguments)), flush=True)
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    worst = 0
    for text in arguments.models or MODELS[device]:
        name, _, budget = text.partition("=")
        key = {
            "model": name,
            "device": device,
            "budget": budget or arguments.budget,
            "neighbours": arguments.neighbours,
        }
        if any(all(row.get(field) == value for field, value in key.items()) for row in done):
            continue
        row = {**key, **measure(name, device, key["budget"], arguments)}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        worst = max(worst, int(not row.get("passed", False)))
        print(
            json.dumps({field: row.get(field) for field in ("model", "plan", "by_hand", "ratio", "passed", "failed")})
        )
    return worst


def measure(name: str, device: str, budget: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Climbs, and compares in a process of its own; returns the fields of the row."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.neighbours)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            start_s = time.monotonic()
            climbed = climb(
                f"{Path(expert_models.__file__).resolve()}:{name}", budget=budget, device=device, out=folder
            )
            climb_s = time.monotonic() - start_s
            command = [sys.executable, __file__, name, "--compare", f"{folder}/plan.toml", "--budget", budget]
            command += ["--turns", str(arguments.turns), "--out", str(arguments.out)]
            found = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        tried = [f"{m.rung or m.plan}: {m.verdict}: {m.reason}" for m in climbed.measurements]
        row = {"plan": str(climbed.plan), "climb_s": climb_s, "claimed": climbed.final.reason, "tried": tried}
        row["other_cores"] = median([m.load["other_cores"] for m in climbed.measurements if m.load])
        if found.returncode:
            return {**row, "failed": found.stderr.strip().splitlines()[-1:]}
        return {**row, **json.loads(found.stdout.splitlines()[-1])}
    except (RedlineError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    finally:
        for process in busy:
            process.kill()
            process.wait()


def compare(name: str, device: str, plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sets up the plan and every variant, finds the best variant, and times it in turns with the plan."""
    workload: Workload = getattr(expert_models, name)()
    batches = [workload.fresh_inputs(seed, device) for seed in (0, 1, 2, 3)]
    limit_s = parse_seconds(arguments.budget)
    calls: dict[str, Call] = {}
    setups: dict[str, float | str] = {}
    for variant, make in {
        "plan": lambda: _planned(plan, workload, batches, device),
        **_variants(workload, device),
    }.items():
        start_s = time.monotonic()
        try:
            run = make()
            for batch in batches:
                run(batch)
            _wait(device)
        except Exception as error:
            setups[variant] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if variant == "plan":
                raise
            continue
        setups[variant] = time.monotonic() - start_s
        if variant == "plan" or time.monotonic() - start_s <= limit_s:
            calls[variant] = _rotating(run, batches)
    by_hand = {variant: _seconds(call_, device) for variant, call_ in calls.items() if variant != "plan"}
    # The two fastest race the plan, because a short look may choose the wrong one.
    rivals = sorted(by_hand, key=lambda variant: by_hand[variant])[:2]
    samples: dict[str, list[float]] = {variant: [] for variant in ("plan", *rivals)}
    order = random.Random(0)
    start_s = time.monotonic()
    for turn in range(arguments.turns):
        if turn >= _LEAST_TURNS and time.monotonic() - start_s > _LONGEST_S:
            break
        for variant in order.sample(sorted(samples), len(samples)):
            samples[variant].append(_seconds(calls[variant], device, turns=3))
    best = min(rivals, key=lambda variant: median(samples[variant]))
    ratio = ratio_interval([(samples[best], samples["plan"])])
    return {
        "by_hand": best,
        "ratio": [ratio.low, ratio.middle, ratio.high],
        "passed": ratio.high >= NEVER_BELOW,
        "samples": samples,
        "short_look_s": by_hand,
        "setup_s": setups,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _rotating(run: Callable[[Any], Any], batches: list[Any]) -> Call:
    left = itertools.cycle(batches)
    return lambda: run(next(left))


def _planned(plan: Plan, workload: Workload, batches: list[Any], device: str) -> Callable[[Any], Any]:
    model = workload.fresh_model(device)
    about: dict[str, Any] = {"samples": batches, "gates": workload.gates}
    if workload.training:
        return plan.apply(model, loss=workload.loss, optimizer=workload.optimizer, **about)
    applied = plan.apply(model, **about)
    assert isinstance(applied, nn.Module)
    return lambda batch: call(applied, batch)


def _variants(workload: Workload, device: str) -> dict[str, Callable[[], Callable[[Any], Any]]]:
    """Returns what an engineer would type, by its name."""
    if device == "cuda":
        layouts = (torch.contiguous_format, torch.channels_last)
        return {
            f"{str(dtype).removeprefix('torch.')}{', channels_last' if layout is torch.channels_last else ''}": (
                lambda dtype=dtype, layout=layout: _by_hand_on_gpu(workload, dtype, layout)
            )
            for dtype in (torch.bfloat16, torch.float16)
            for layout in layouts
        }
    if workload.training:
        raise RedlineError("training steps are compared on a GPU.")
    return {
        "eager": lambda: _without_gradients(workload.fresh_model(device)),
        "torch.compile": lambda: _without_gradients(torch.compile(workload.fresh_model(device))),
        "ONNX Runtime": lambda: _in_onnxruntime(workload.fresh_model(device), workload.fresh_inputs(0, device)),
    }


def _by_hand_on_gpu(workload: Workload, dtype: torch.dtype, layout: torch.memory_format) -> Callable[[Any], Any]:
    model = workload.fresh_model("cuda")
    if workload.training:
        assert workload.loss is not None and workload.optimizer is not None
        loss, optimizer = workload.loss, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        compiled = torch.compile(model, mode="reduce-overhead")

        def step(batch: Any) -> Any:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype):
                value = loss(call(compiled, batch), batch)
            value.backward()
            optimizer.step()
            return value.detach()

        return step
    model = model.to(dtype=dtype, memory_format=layout)  # pyrefly: ignore[no-matching-overload]

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.to(dtype, memory_format=layout if leaf.ndim == 4 else torch.preserve_format)

    run = _without_gradients(torch.compile(model, mode="reduce-overhead"))
    return lambda batch: run(pytree.tree_map(convert, batch))


def _without_gradients(model: Any) -> Callable[[Any], Any]:
    def run(batch: Any) -> Any:
        with torch.no_grad():
            return call(model, batch)

    return run


def _in_onnxruntime(model: nn.Module, batch: Any) -> Callable[[Any], Any]:
    import onnxruntime

    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(copy.deepcopy(model), args, path, kwargs=kwargs, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(batch: Any) -> Any:
        return session.run(None, dict(zip(names, (leaf.numpy() for leaf in pytree.tree_leaves(batch)), strict=True)))

    return run


def _seconds(run: Call, device: str, turns: int = 8) -> float:
    """Returns the lower quartile of the times of a few calls."""
    times = []
    run()
    for _ in range(turns):
        _wait(device)
        start_s = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start_s)
    return sorted(times)[len(times) // 4]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
