"""Compares the decoding speed of Redline and transformers for a Llama-style model on a CUDA device.

All arms use the same random weights (1.24B parameters, bf16) and prompts, and are timed in turns. The time per token is
the time after the first token, divided by the number of following tokens; prefill is reported separately. Before an arm
is timed, its logits are compared with those of the model in fp32. An arm whose error is much larger than that of plain
bf16, given its number format, is not timed. Rows are JSON lines, written after every measurement, so that a killed run
keeps its results.

    python benchmarks/decode.py --out decode.jsonl --batch 1 --batch 32 [--limit-s 300]
"""

import argparse
import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_speed import version_of, write_rows

from redline.generation import InferenceEngine
from redline.ladder.search.run_log import command_line
from redline.models.decoder import Decoder, DecoderConfig
from redline.models.decoder.checkpoint import pieces
from redline.models.decoder.hugging_face import write_config
from redline.models.decoder.paged_cache import FlatCall
from redline.nn.linear import Linear
from redline.ops.paged_attention import PagedRows

LARGE = DecoderConfig(
    128_256, 2048, 16, 32, 8192, key_value_heads=8, context=2048, rope_base=500_000.0, tied_embeddings=True
)
TINY = DecoderConfig(512, 64, 2, 4, 128, key_value_heads=2, context=512, tied_embeddings=True)
# The largest error of the logits, as a multiple of the error of plain bf16. The rounding error of a weight is about 7
# times that of bf16 for int8 with a scale per output, and 16 times for fp8 with 3 mantissa bits. Implementations round
# at different places.
LARGEST_ERROR = {"int8": 8, "fp8": 16, "": 2}
# The tiny model is in fp32, where the error is nearly zero.
LEAST_ERROR = 2**-9
# The tokens in a page of the key-value cache.
PAGE = 64


@dataclass
class Arm:
    """`run` generates and returns the seconds to the first token and of the rest; `logits` are after the prompt."""

    run: Callable[[], tuple[float, float]]
    logits: Callable[[], Tensor]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    model: Decoder
    prompts: list[list[int]]
    tokens: int
    device: str

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def ours(task: Task, plan: str, graph: bool, linear: str | None = None) -> Arm:
    rows, longest = len(task.prompts), len(task.prompts[0]) + task.tokens
    pages = -(-longest // PAGE)
    cache: dict[str, Any] = {"max_rows": rows, "block_size": PAGE, "blocks": rows * pages}
    engine = InferenceEngine(task.model, plan, graph=graph and task.device == "cuda", **cache)
    for module in engine.model.applied.modules():
        if isinstance(module, Linear) and linear is not None:
            module.implementation = linear

    def run() -> tuple[float, float]:
        with engine.stream(task.prompts, max_tokens=task.tokens) as stream:
            for _ in stream:
                pass
        return stream.prefill_s, sum(stream.step_s)

    @torch.no_grad()
    def logits() -> Tensor:
        """Processes the last token with a decoding step, so that the checked code is the timed code."""
        tokens = torch.tensor(task.prompts, device=task.device)
        pool = engine.model.new_pages(rows * pages, PAGE)
        tables = torch.arange(rows * pages, device=task.device).view(rows, pages)
        before = tokens.shape[1] - 1
        found = tokens.new_empty(0)
        for first, count in ((0, before), (before, 1)):
            positions = torch.arange(first, first + count, device=task.device)
            slots = (tables[:, positions // PAGE] * PAGE + positions % PAGE).flatten()
            starts = torch.arange(rows + 1, device=task.device) * count
            singles = rows if count == 1 else 0
            paged = PagedRows(slots, starts, torch.full_like(starts[1:], first), tables, singles, singles)
            call = FlatCall(positions.repeat(rows), starts[1:] - 1, paged, pool)
            found = engine.model.flat(tokens[:, positions].flatten(), call, count == 1)
        return found.float()

    def about() -> dict[str, Any]:
        return {"plan": str(engine.plan), "proofs": engine.model.proofs(), "setup_s": engine.setup_s}

    return Arm(run, logits, {"later": about})


def transformers_arm(task: Task, static: bool) -> Arm:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    settings = write_config(task.model.config, "bfloat16")
    for earlier in ("rope_scaling", "rope_theta"):
        settings.pop(earlier)
    with torch.device(task.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model = model.to(dtype=task.model.norm.weight.dtype).eval()
    parameters = dict(task.model.named_parameters(remove_duplicate=False))
    theirs = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for piece in pieces(task.model.config):
            theirs[piece.name].copy_(piece.of(parameters))
    model.generation_config.eos_token_id = None
    tokens = torch.tensor(task.prompts, device=task.device)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"

    def seconds(work: Callable[[], Any]) -> float:
        task.wait()
        begun = time.perf_counter()
        work()
        task.wait()
        return time.perf_counter() - begun

    def run() -> tuple[float, float]:
        """Times the prefill separately, because generating one token would use another size of static cache."""
        count = task.tokens
        first = seconds(logits)
        rest = lambda: model.generate(tokens, max_new_tokens=count, min_new_tokens=count, **options)  # noqa: E731
        return first, seconds(rest) - first

    @torch.no_grad()
    def logits() -> Tensor:
        return model(tokens, logits_to_keep=1).logits[:, -1].float()

    return Arm(run, logits, {"transformers": version_of("transformers")})


def free(task: Task) -> None:
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()


def arms(task: Task) -> dict[str, Callable[[], Arm]]:
    found: dict[str, Callable[[], Arm]] = {
        "redline eager": lambda: ours(task, "", graph=False),
        "redline graph": lambda: ours(task, "", graph=True),
        "redline fused_ops + graph": lambda: ours(task, "fused_ops", graph=True),
        "redline fused_ops + small_matmul everywhere + graph": lambda: ours(task, "fused_ops", True, "triton"),
        "redline fused_ops, torch's products + graph": lambda: ours(task, "fused_ops", True, "reference"),
        "redline compile + graph": lambda: ours(task, "compile", graph=True),
        "redline fused_ops + compile + graph": lambda: ours(task, "fused_ops + compile", graph=True),
        "redline compile(max-autotune) + graph": lambda: ours(task, "compile(mode=max-autotune)", graph=True),
        "redline int8 + graph": lambda: ours(task, "fused_ops + int8", graph=True),
        "redline int8 + compile + graph": lambda: ours(task, "fused_ops + int8 + compile", graph=True),
        "redline fp8 + compile + graph": lambda: ours(task, "fused_ops + fp8(mode=weight_only) + compile", graph=True),
    }
    if find_spec("transformers") is not None:
        found["transformers, dynamic cache"] = lambda: transformers_arm(task, static=False)
        found["transformers, static cache + compile"] = lambda: transformers_arm(task, static=True)
    return found


def measure(
    task: Task,
    rounds: int,
    only: list[str],
    is_late: Callable[[], bool],
    keep: Callable[[Iterable[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Returns a row for each arm; calls `keep` with all rows after every set-up and every round."""
    expected = ours(replace(task, model=copy.deepcopy(task.model).float()), "", graph=False).logits()
    free(task)
    rounding = (ours(task, "", graph=False).logits() - expected).norm() / expected.norm()
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Arm] = {}
    for name, build in arms(task).items():
        if only and not any(part in name for part in only):
            continue
        row: dict[str, Any] = {"arm": name, "batch": len(task.prompts), "tokens": task.tokens}
        rows[name] = row
        if is_late():
            row["failure"] = "skipped: the time of --limit-s was over"
            continue
        begun = time.perf_counter()
        try:
            arm = build()
            error = ((arm.logits() - expected).norm() / expected.norm()).item()
            row["relative_error"] = error
            limit = next(limit for word, limit in LARGEST_ERROR.items() if word in name)
            if not error <= limit * max(rounding.item(), LEAST_ERROR):
                raise ArithmeticError(f"off by {error:.3g}, where {rounding:.3g} is bf16's")
            arm.run()
            row["first_call_s"] = time.perf_counter() - begun
            later = arm.about.pop("later", None)
            row |= arm.about | (later() if later is not None else {})
            ready[name] = arm
        except Exception as failure:  # noqa: BLE001 (reported in the arm's row)
            row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
        keep(rows.values())
        print(f"{name}: {row.get('failure', 'ready')}", file=sys.stderr, flush=True)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    weights = sum(p.nbytes for p in task.model.parameters())
    for _ in range(rounds):
        for name, arm in list(ready.items()):
            try:
                samples[name].append(arm.run())
            except Exception as failure:  # noqa: BLE001 (as above)
                rows[name]["failure"] = f"{type(failure).__name__}: {failure}"[:500]
                del ready[name]
                continue
            steps_ms = [1000 * rest / (task.tokens - 1) for _, rest in samples[name]]
            median = statistics.median(steps_ms)
            rows[name] |= {
                "ms_per_token": median,
                "ms_per_token_samples": steps_ms,
                "prefill_ms": 1000 * statistics.median(first for first, _ in samples[name]),
                "tokens_per_s": 1000 * len(task.prompts) / median,
                "bf16_weights_tb_per_s": weights / median / 1e9,
            }
        keep(rows.values())
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Times decoding against transformers.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--batch", type=int, action="append", help="batch size; repeatable, 1 by default")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", action="append", default=[], help="run only arms whose name contains this; repeatable"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="set up no more arms after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU, as a smoke test")
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    torch.manual_seed(0)
    config = TINY if arguments.tiny else LARGE
    with torch.device(device):
        model = Decoder(config).to(torch.float32 if arguments.tiny else torch.bfloat16).eval()
    gpu = "none" if arguments.tiny else torch.cuda.get_device_name()
    about = {"gpu": gpu, "torch": torch.__version__, "parameters": config.parameters, "prompt": arguments.prompt}
    about["command"] = command_line(sys.argv)
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch or [1]:
        prompts = torch.randint(config.vocabulary, (batch, arguments.prompt)).tolist()
        torch.compiler.reset()
        measured = measure(
            Task(model, prompts, arguments.tokens, device),
            arguments.rounds,
            arguments.only,
            is_late=lambda: time.perf_counter() - begun > arguments.limit_s,
            keep=lambda so_far: write_rows(arguments.out, [*rows, *(about | row for row in so_far)], "ms_per_token"),
        )
        rows.extend(about | row for row in measured)
        write_rows(arguments.out, rows, "ms_per_token")
        for row in sorted(measured, key=lambda row: row.get("ms_per_token", float("inf"))):
            said = row.get("failure") or f"{row['ms_per_token']:.3f} ms a token, prefill {row['prefill_ms']:.1f} ms"
            print(f"batch {batch}, {row['arm']}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
