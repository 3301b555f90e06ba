"""Measures the inference engine on one GPU: throughput, the time of a step, prompts, cached prefixes and sessions.

    python benchmarks/serving.py --out FILE [--case offline --case single …] [--plan fused_ops] [--limit-s 400]

The decoder has 1.24B parameters in bf16 and random weights; prompts are random tokens, so they share no prefix unless a
case says so. Times include the prompts. The time of a step is the median over the steps in which every row decodes.
Rows are JSON lines, written after every case, so that a killed run keeps its results.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from decode import LARGE, TINY
from long_context import build
from train_speed import write_rows

from redline.generation.engine import Engine
from redline.generation.request import Grammar, Output, Request
from redline.ladder.search.run_log import command_line
from redline.models.decoder import Decoder

_CONTEXT = 131_072
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PROFILED_STEPS = 20


@dataclass(frozen=True)
class Bench:
    """What all cases share. With `tiny`, sizes are divided by 16, for a smoke test on the CPU."""

    model: Any
    plan: str
    device: str
    tiny: bool

    def size(self, full: int) -> int:
        return max(4, full // 16) if self.tiny else full

    def engine(self, **options: Any) -> Engine:
        engine = Engine(self.model, self.plan, **options)
        engine.warm_up()
        return engine

    def prompt(self, tokens: int, seed: int) -> list[int]:
        made = torch.Generator().manual_seed(seed)
        return torch.randint(256, 500, (tokens,), generator=made).tolist()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class Run:
    """The outputs of requests that were submitted together, with the times at which they came."""

    seconds: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    cached: int = 0

    @property
    def total(self) -> int:
        return sum(self.tokens.values())

    def note(self, output: Output, now_s: float) -> None:
        if output.error:
            raise RuntimeError(output.error)
        if output.tokens:
            if output.id in self.last_s:
                self.gaps_s.append(now_s - self.last_s[output.id])
            self.first_s.setdefault(output.id, now_s)
            self.last_s[output.id] = now_s
            self.tokens[output.id] = self.tokens.get(output.id, 0) + len(output.tokens)
        if output.finish is not None:
            self.cached += output.cached_tokens


def run(bench: Bench, engine: Engine, requests: Sequence[Request]) -> Run:
    """Submits all requests at once and runs the engine until they have ended."""
    found, begun = Run(), time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) == len(requests) and all(len(output.tokens) == 1 for output in outputs):
            found.steps_s.append(now - before)
        for output in outputs:
            found.note(output, now - begun)
    bench.wait()
    found.seconds = time.perf_counter() - begun
    return found


def requests(bench: Bench, lengths: Sequence[int], tokens: int, seed: int, **options: Any) -> list[Request]:
    return [
        Request(f"{seed}-{index}", bench.prompt(length, seed * 100_003 + index), tokens, **options)
        for index, length in enumerate(lengths)
    ]


def spread_lengths(count: int, least: int, most: int) -> list[int]:
    """Returns lengths from `least` to `most`, evenly spread and shuffled with a fixed seed."""
    even = [least + round((most - least) * index / max(1, count - 1)) for index in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [even[index] for index in order]


def best_of(bench: Bench, engine: Engine, make: Callable[[int], list[Request]], rounds: int = 3) -> list[Run]:
    """Runs one round for warm-up and `rounds` that are timed, each with prompts of its own."""
    return [run(bench, engine, make(seed)) for seed in range(rounds + 1)][1:]


def throughput(bench: Bench, count: int, least: int, most: int, tokens: int) -> dict[str, Any]:
    engine = bench.engine(max_rows=count)
    lengths = spread_lengths(count, least, most)
    runs = best_of(bench, engine, lambda seed: requests(bench, lengths, tokens, seed))
    steps = [step for one in runs for step in one.steps_s]
    return {
        "requests": count,
        "prompt_tokens": sum(lengths),
        "output_tokens_per_s": statistics.median(one.total / one.seconds for one in runs),
        "output_tokens_per_s_samples": [one.total / one.seconds for one in runs],
        "step_ms": 1000 * statistics.median(steps) if steps else None,
        "setup_s": engine.setup_s,
        "preemptions": engine.stats().preemptions,
        "device_idle": device_idle(bench, engine, requests(bench, lengths, tokens, 9)),
    }


def device_idle(bench: Bench, engine: Engine, given: Sequence[Request]) -> float | None:
    """Returns the share of time without a kernel, over some steps in which every row decodes."""
    if bench.device != "cuda":
        run(bench, engine, given)
        return None
    for request in given:
        engine.submit(request)
    while engine.has_work and not (engine.stats().waiting == 0 and len(engine.step()) == len(given)):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED_STEPS):
            engine.step()
        bench.wait()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    for request in given:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return 1 - busy / (end - spans[0][0]) if spans else None


def offline(bench: Bench) -> dict[str, Any]:
    count, most = (16, 64) if bench.tiny else (256, 1024)
    return throughput(bench, count, bench.size(100), most, bench.size(256))


def batch_32(bench: Bench) -> dict[str, Any]:
    return throughput(bench, bench.size(32), bench.size(128), bench.size(128), bench.size(256))


def single(bench: Bench) -> dict[str, Any]:
    engine = bench.engine()
    runs = best_of(bench, engine, lambda seed: requests(bench, [bench.size(128)], bench.size(256), seed))
    steps = [step for one in runs for step in one.steps_s]
    return {
        "ms_per_token": 1000 * statistics.median(steps),
        "prompt_ms": 1000 * statistics.median(one.first_s[next(iter(one.first_s))] for one in runs),
        "prompt_tokens": bench.size(128),
    }


def prefill(bench: Bench) -> dict[str, Any]:
    """Prompts of 1,024 tokens with one token of output each."""
    count, length = bench.size(128), bench.size(1024)
    engine = bench.engine()
    runs = best_of(bench, engine, lambda seed: requests(bench, [length] * count, 1, seed))
    return {"prompt_tokens_per_s": statistics.median(count * length / one.seconds for one in runs)}


def prefix(bench: Bench) -> dict[str, Any]:
    """Requests one after the other, with 1,024 tokens of prompt of which 90% are cached, against none."""
    length, shared = bench.size(1024), bench.size(1024) * 9 // 10
    engine = bench.engine()
    first: dict[str, list[float]] = {"cold": [], "cached": []}
    common = bench.prompt(shared, 1)
    run(bench, engine, [Request("common", [*common, *bench.prompt(length - shared, 2)], 1)])
    for seed in range(3, 13):
        for kind, beginning in (("cold", bench.prompt(shared, 1000 + seed)), ("cached", common)):
            request = Request(f"{kind}-{seed}", [*beginning, *bench.prompt(length - shared, seed)], 4)
            found = run(bench, engine, [request])
            first[kind].append(found.first_s[request.id])
            assert (found.cached > 0) == (kind == "cached"), found.cached
    cold, cached = (statistics.median(first[kind]) for kind in ("cold", "cached"))
    return {"first_token_cold_ms": 1000 * cold, "first_token_cached_ms": 1000 * cached, "ratio": cached / cold}


def long_prompt(bench: Bench) -> dict[str, Any]:
    """64 texts are being generated while a long prompt comes; the longest gap between two tokens of a text."""
    count = bench.size(64)
    engine = bench.engine(max_rows=count + 1)
    given = requests(bench, [bench.size(128)] * count, bench.size(512), 1)
    length = min(bench.size(100_000), bench.model.context - 8)
    for request in given:
        engine.submit(request)
    found, begun = Run(), time.perf_counter()
    steps = 0
    while engine.has_work:
        if steps == bench.size(64):
            engine.submit(Request("long", bench.prompt(length, 5), 4))
        for output in engine.step():
            if output.id != "long":
                found.note(output, time.perf_counter() - begun)
        steps += 1
    gaps = sorted(found.gaps_s)
    return {
        "long_prompt_tokens": length,
        "gap_ms_p50": 1000 * statistics.median(gaps),
        "gap_ms_p99": 1000 * gaps[int(0.99 * (len(gaps) - 1))],
        "gap_ms_max": 1000 * gaps[-1],
    }


def grammar(bench: Bench) -> dict[str, Any]:
    """All rows follow a grammar, against none; the text of the grammar never ends by itself."""
    tokenizer = made_tokenizer(bench.model.vocabulary)
    count, tokens = bench.size(256), bench.size(128)
    engine = bench.engine(max_rows=count, tokenizer=tokenizer)
    rows: dict[str, Any] = {}
    letters = Grammar("lark", 'start: "[" /[a-z]/ ("," /[a-z]/)*')
    for name, options in (("free", {}), ("json", {"grammar": letters})):
        runs = best_of(
            bench, engine, lambda seed, o=options: requests(bench, [16] * count, tokens, seed, **o), rounds=2
        )
        rows[f"{name}_tokens_per_s"] = statistics.median(one.total / one.seconds for one in runs)
    return rows | {"slowdown": rows["free_tokens_per_s"] / rows["json_tokens_per_s"]}


def sessions(bench: Bench) -> dict[str, Any]:
    """Concurrent texts of the 124M memory model, each after a history of 100,000 tokens, of which 64 are distinct.

    The memory must be that of the rows alone, however long the histories are.
    """
    count, distinct, history = bench.size(4096), bench.size(64), bench.size(100_000)
    bench = replace(bench, model=build("memory", 0, 0, bench.tiny))
    engine = bench.engine(max_rows=count)
    for index in range(distinct):
        engine.submit(Request(f"history-{index}", bench.prompt(history, index), 1), state=engine.new_state())
    begun = time.perf_counter()
    while engine.has_work:
        engine.step()
    bench.wait()
    history_s = time.perf_counter() - begun
    states = [engine.take_state(f"history-{index}") for index in range(distinct)]
    reserved = torch.cuda.memory_reserved() if bench.device == "cuda" else 0
    found, begun = Run(), time.perf_counter()
    for index, request in enumerate(requests(bench, [16] * count, bench.size(128), 7)):
        engine.submit(request, state=states[index % distinct])
    while engine.has_work:
        for output in engine.step():
            found.note(output, time.perf_counter() - begun)
    bench.wait()
    seconds = time.perf_counter() - begun
    return {
        "sessions": count,
        "history_tokens": history,
        "history_tokens_per_s": distinct * history / history_s,
        "output_tokens_per_s": found.total / seconds,
        "state_bytes": states[0].bytes,
        "reserved_bytes_before": reserved,
        "reserved_bytes_after": torch.cuda.memory_reserved() if bench.device == "cuda" else 0,
    }


def made_tokenizer(vocabulary: int) -> Any:
    """Returns a byte-level tokenizer with this many tokens: bytes and random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    drawn = torch.randint(26, (vocabulary, 6), generator=torch.Generator().manual_seed(0))
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    words = ("".join(_LETTERS[letter] for letter in row) for row in drawn.tolist())
    names = list(dict.fromkeys([*names, *words]))[:vocabulary]
    names += [f"<unused-{index}>" for index in range(vocabulary - len(names))]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    one.__name__: one for one in (offline, batch_32, single, prefill, prefix, long_prompt, grammar, sessions)
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the inference engine.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="repeatable; default: all")
    parser.add_argument("--plan", help="the plan of the model (default: fused_ops on a GPU)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no more cases after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU, as a smoke test")
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    torch.manual_seed(0)
    config = TINY if arguments.tiny else replace(LARGE, context=_CONTEXT)
    with torch.device(device):
        model = Decoder(config).to(torch.float32 if arguments.tiny else torch.bfloat16).eval()
    plan = arguments.plan if arguments.plan is not None else "" if arguments.tiny else "fused_ops"
    bench = Bench(model, plan, device, arguments.tiny)
    gpu = "none" if arguments.tiny else torch.cuda.get_device_name()
    about = {"gpu": gpu, "torch": torch.__version__, "parameters": config.parameters, "plan": plan}
    about["command"] = command_line(sys.argv)
    rows: list[dict[str, Any]] = []
    for name in arguments.case or CASES:
        row: dict[str, Any] = about | {"case": name}
        if time.perf_counter() - begun > arguments.limit_s:
            row["failure"] = "skipped: the time of --limit-s was over"
        else:
            try:
                row |= {"measured": CASES[name](bench)}
            except Exception as failure:  # noqa: BLE001 (reported in the case's row)
                row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
        rows.append(row)
        write_rows(arguments.out, rows, "measured")
        print(f"{name}: {row.get('failure') or row['measured']}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return 1 if any("failure" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
