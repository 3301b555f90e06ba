"""Compares training on packed documents with training on the same documents padded.

    python benchmarks/packing.py --out FILE [--length 2048 --rows 16 --rounds 8] [--median 500] [--device cpu]

Document lengths are drawn from a log-normal distribution (sigma 1, like web pages), limited to the length of a row; the
median is `--median` tokens, by default a quarter of the row. Every arm trains the 124M decoder (on a CPU, a small one)
with the same plan, as `redline train` does, in turns. The arms are packed rows with attention within documents, rows
padded to the full length, and rows padded to the longest of their batch. Throughput counts tokens with a target.
`sequences` is the number of rows for 10,000 documents.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from train_speed import CONFIG, TINY_VOCABULARY, Drawn, arm_of

from redline import RedlineError
from redline.files.atomic import write_text
from redline.ladder.search.run_log import command_line
from redline.machine.machine import Machine, resolve_device
from redline.nn.packing import Packing
from redline.training.text.architectures import DecoderSettings
from redline.training.text.config import TextTraining
from redline.training.text.packing import NO_TARGET, Batch

DOCUMENTS = 10_000
# Padded lengths are multiples of this, for fewer different shapes.
_STEP = 64


@dataclass(frozen=True)
class Text:
    """Random documents; only their lengths matter, because only time is measured."""

    length: int
    rows: int
    median: int

    def lengths(self, seed: int, count: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        drawn = self.median * torch.randn(count, generator=random).exp()
        return drawn.round().long().clamp(2, self.length)

    def packed(self, step: int) -> Batch:
        """Returns a batch of concatenated documents; the last document of a row is truncated."""
        documents = torch.zeros(self.rows, self.length, dtype=torch.int64)
        for row in range(self.rows):
            lengths = self.lengths(step * self.rows + row, self.length // 2)
            documents[row] = torch.repeat_interleave(lengths)[: self.length]
        ends = torch.ones_like(documents, dtype=torch.bool)
        ends[:, :-1] = documents[:, 1:] != documents[:, :-1]
        return self._batch(step, ends, Packing.of(documents))

    def padded(self, step: int, to_longest: bool) -> Batch:
        lengths = self.lengths(step, self.rows)
        width = min(self.length, -(-int(lengths.max()) // _STEP) * _STEP) if to_longest else self.length
        # Padding needs no mask, because attention is causal.
        without_target = torch.arange(width) >= lengths[:, None] - 1
        return self._batch(step, without_target, Packing.of(torch.zeros_like(without_target, dtype=torch.int64)))

    def _batch(self, step: int, without_target: torch.Tensor, packing: Packing) -> Batch:
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(TINY_VOCABULARY, without_target.shape, generator=random)
        return Batch(tokens, tokens.masked_fill(without_target, NO_TARGET), packing)

    def sequences(self) -> dict[str, int]:
        """Returns the number of rows for `DOCUMENTS` documents."""
        total = int(self.lengths(0, DOCUMENTS).sum())
        return {"packed": -(-total // self.length), "padded": DOCUMENTS}


def training_of(text: Text, plan: str, device: torch.device) -> TextTraining:
    given = TextTraining.read(CONFIG)
    model = given.model
    assert isinstance(model, DecoderSettings)
    if device.type == "cpu":
        model = replace(model, width=128, layers=2, heads=4, mlp_width=384)
        given = replace(given, tokenizer=replace(given.tokenizer, vocabulary=TINY_VOCABULARY))
    return replace(
        given,
        model=replace(model, context=text.length),
        data=replace(given.data, length=text.length, batch=text.rows),
        loop=replace(given.loop, plan=plan, precision="fp32" if device.type == "cpu" else "bf16"),
    )


def measure(text: Text, plan: str, device: torch.device, rounds: int, steps: int) -> list[dict[str, Any]]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    draws: dict[str, Callable[[int], Batch]] = {
        "packed": text.packed,
        "padded to the row": lambda step: text.padded(step, to_longest=False),
        "padded to the longest of the batch": lambda step: text.padded(step, to_longest=True),
    }
    training = training_of(text, plan, device)
    arms = {name: arm_of(Drawn(training, device, draw)) for name, draw in draws.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    # The first turn is a warm-up, which compiles and selects kernels.
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            wait()
            begun = time.perf_counter()
            for index in range(steps):
                arm.step(turn * steps + index)
            wait()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    rows = []
    for name, draw in draws.items():
        batches = [draw(step) for step in range(steps, (rounds + 1) * steps)]
        useful, computed = sum(batch.targets for batch in batches), sum(batch.tokens_BS.numel() for batch in batches)
        packed = "packed" if name == "packed" else "padded"
        rows.append(
            {
                "arm": name,
                "length": text.length,
                "batch": text.rows,
                "median_document": text.median,
                "plan": plan,
                "tokens_per_s": useful / sum(seconds[name]),
                "waste": 1 - useful / computed,
                "sequences": text.sequences()[packed],
                "turn_s": seconds[name],
                "median_turn_s": statistics.median(seconds[name]),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times packed against padded training.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--median", type=int, help="median document length in tokens; a quarter of a row by default")
    parser.add_argument("--plan", default="fused_ops", help="plan of all arms; compile would recompile for each length")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    try:
        device = torch.device(resolve_device(given.device))
        text = Text(given.length, given.rows, given.median or given.length // 4)
        rows = measure(text, given.plan, device, given.rounds, given.steps)
    except RedlineError as error:
        print(error, file=sys.stderr)
        return 2
    machine = Machine.detect(str(device))
    about = {"gpu": machine.name, "torch": torch.__version__, "command": command_line(sys.argv)}
    write_text(given.out, "".join(json.dumps(about | row) + "\n" for row in rows))
    for row in rows:
        said = f"{row['tokens_per_s']:,.0f} tokens/s, {row['waste']:.0%} wasted"
        print(f"{row['arm']}: {said}, {row['sequences']:,} rows for {DOCUMENTS:,} documents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
