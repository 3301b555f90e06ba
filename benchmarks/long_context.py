"""Measures memory, prefill time and time per token by text length, for the 124M decoder and Titans model.

    python benchmarks/long_context.py --out FILE [--lengths 2048,8192,32768] [--decoder-limit 131072] [--slots 512]
        [--slots-limit 131072]

Random weights in bf16, one row of random tokens, prefilled in chunks, then 32 tokens with the captured CUDA graph.
`state_bytes` is the memory used after the text, `peak_bytes` the peak, both without the weights. The Titans model is
measured as shipped, without a slot bank, and with one, which processes a text segment by segment. A length that fails
has a row with the reason. Rows are written after each measurement.
"""

import argparse
import gc
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train_speed import Race

from redline.files.atomic import write_text
from redline.generation.static_batch import StaticBatchEngine
from redline.ladder.search.run_log import command_line
from redline.training.text.architectures import MemorySettings

LENGTHS = (2048, 8192, 32_768, 131_072, 1_048_576)
MORE_TOKENS = 32
# Enough that the CUDA graph of a prefill chunk is captured, too.
WARM_UP_TOKENS = 20_480
PLAN = "fused_ops"


def build(kind: str, length: int, slots: int, tiny: bool) -> nn.Module:
    race = Race(length + MORE_TOKENS, 1, tiny)
    training = race.training(kind, "")
    shape = training.model
    if isinstance(shape, MemorySettings):
        shape = replace(shape, memory_slots=slots)
    model = shape.build(training.tokenizer.vocabulary)
    return model.to(race.device, torch.float32 if tiny else torch.bfloat16).eval()


def measure(kind: str, length: int, slots: int, tiny: bool) -> dict[str, Any]:
    arm = f"redline {kind}, {slots} slots" if slots else f"redline {kind}"
    row: dict[str, Any] = {"arm": arm, "length": length, "plan": "" if tiny else PLAN}
    try:
        engine = StaticBatchEngine(build(kind, length, slots, tiny), row["plan"], share=True)
        row["parameters"] = sum(weight.numel() for weight in engine.model.applied.parameters())
        source = random.Random(length)
        prompt = [source.randrange(engine.model.vocabulary) for _ in range(length)]
        # Warm-up: compiles and loads kernels for full chunks, the remainder and single tokens.
        engine.generate([prompt[:WARM_UP_TOKENS]], max_tokens=2)
        before = 0
        if not tiny:
            engine._idle = None
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with engine.stream([prompt], max_tokens=MORE_TOKENS) as stream:
            for _ in stream:
                pass
            if not tiny:
                row["state_bytes"] = torch.cuda.memory_allocated() - before
                row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        row["prefill_s"] = stream.prefill_s
        row["prefill_tokens_per_s"] = length / stream.prefill_s
        row["ms_per_token"] = 1e3 * sorted(stream.step_s)[len(stream.step_s) // 2]
    except Exception as failure:  # noqa: BLE001 (reported in the row)
        row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures memory and speed by text length.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--decoder-limit", type=int, default=LENGTHS[-1], help="longest text of the decoder")
    parser.add_argument("--slots", type=int, default=512, help="slots of the Titans model with a bank; 0 skips it")
    parser.add_argument("--slots-limit", type=int, default=131_072, help="longest text of the Titans model with a bank")
    parser.add_argument("--tiny", action="store_true", help="run tiny models on the CPU, as a smoke test")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    about: dict[str, Any] = {
        "gpu": "none" if asked.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "batch": 1,
    }
    about["command"] = command_line(sys.argv)
    rows: list[dict[str, Any]] = []
    for length in map(int, asked.lengths.split(",")):
        chosen = [("memory", 0)]
        if length <= asked.decoder_limit:
            chosen.append(("decoder", 0))
        if asked.slots and length <= asked.slots_limit:
            chosen.append(("memory", asked.slots))
        for kind, slots in chosen:
            rows.append(about | measure(kind, length, slots, asked.tiny))
            write_text(asked.out, "".join(json.dumps(row) + "\n" for row in rows))
            print({key: rows[-1][key] for key in rows[-1] if key not in about}, flush=True)
            gc.collect()
            if not asked.tiny:
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
