"""Trains a chat model on written conversations in pieces of minutes, with a state that can move between machines.

    python benchmarks/talk_training.py talk-small --minutes 9 --out OUT
    python benchmarks/talk_training.py talk-small --minutes 9 --out OUT --state FOLDER_OF_THE_PIECE_BEFORE

A piece ends before `--minutes` are over (start-up included), on SIGTERM, or at the end of the schedule. It writes to
`--out`: `result.json`, which is also printed, and `piece.tar.000`, `piece.tar.001`, … of at most 15 MiB, which the next
piece takes with `--state` and `bundle_talk.py` makes the bundled model from. Together these files are an archive of the
compact training state, the journal, the tokenizer and the folder of the model, whose averaged weights are fp16.
Conversations depend on the seed and the row only, so that the pieces train on the same ones as one long training.
"""

import argparse
import copy
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from long_training import SAY_EVERY_S, keep, restore, say
from torch import nn

from redline import RedlineError
from redline.files.atomic import write_bytes, write_text
from redline.machine.machine import resolve_device
from redline.training.bundled import find_config
from redline.training.journal import NAME as JOURNAL
from redline.training.journal import read_journal
from redline.training.loop import Progress, train
from redline.training.text.run import prepare_training
from redline.training.text.task import LanguageTask
from redline.training.text.tokenizer import NAME as TOKENIZER

ARCHIVE, MODEL = "piece.tar", "model"
PART_BYTES = 15 * 2**20


class Lines:
    """Prints the progress every `SAY_EVERY_S` seconds."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, seen: Progress) -> None:
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            figures = {name: round(value, 3) for name, value in seen.figures.items()}
            rate = f"{seen.learning_rate:.2e}, {seen.items_per_s:,.0f} tokens/s, {seen.left_s:.0f} s left"
            say(f"step {seen.step}, loss {seen.loss:.4f}, norm {seen.gradient_norm:.3f}, rate {rate} {figures or ''}")


def pack(folder: Path, out: Path) -> None:
    """Writes the content of a folder to `out` as the parts of an archive; replaces older parts."""
    whole = folder.with_suffix(".tar")
    with tarfile.open(whole, "w") as archive:
        archive.add(folder, ".")
    for old in out.glob(f"{ARCHIVE}.*"):
        old.unlink()
    with open(whole, "rb") as file:
        for number, part in enumerate(iter(lambda: file.read(PART_BYTES), b"")):
            write_bytes(out / f"{ARCHIVE}.{number:03}", part)
    whole.unlink()


def unpack(out: Path, folder: Path) -> None:
    """Undoes `pack`."""
    parts = sorted(out.glob(f"{ARCHIVE}.*"))
    if not parts:
        raise RedlineError(f"{str(out)!r} has no {ARCHIVE}.000: give the folder that a piece wrote.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as whole:
        for part in parts:
            whole.write(part.read_bytes())
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole) as archive:
                archive.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise RedlineError(f"the {len(parts)} parts in {str(out)!r} are no complete archive: {error}.") from error


def copy_tokenizer(folder: Path, to: Path) -> None:
    """Copies the tokenizer that a training run trained; the config may name a file instead."""
    if (folder / TOKENIZER).exists():
        shutil.copyfile(folder / TOKENIZER, to / TOKENIZER)


def save_half(task: LanguageTask, model: nn.Module, folder: Path) -> None:
    """Writes the model folder with weights in fp16, half the size of a training run's own."""
    stored = copy.deepcopy(model).half()
    if not all(bool(weight.isfinite().all()) for weight in stored.parameters()):
        raise RedlineError("a weight is too large for fp16.")
    task.save(stored, folder)


def run_piece(arguments: argparse.Namespace, begun_s: float) -> dict[str, Any]:
    config, _ = find_config(arguments.config, "text")
    device = torch.device(resolve_device(arguments.device))
    out, is_next = arguments.out, arguments.state is not None
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="redline-training-") as temporary:
        work, kept = Path(temporary, "work"), Path(temporary, "kept")
        work.mkdir()
        first, before_s = 0, 0.0
        if is_next:
            unpack(arguments.state, Path(temporary, "before"))
            first, before_s = restore(Path(temporary, "before"), work)
            copy_tokenizer(Path(temporary, "before"), work)
        task = prepare_training(config, work, device, is_next, say, say, steps=arguments.steps)
        settings = task.training.loop
        say(f"{sum(weight.numel() for weight in task.model.parameters()):,} parameters, from step {first}")
        left_s = 60 * arguments.minutes - arguments.reserve - (time.monotonic() - begun_s)
        # The training loop saves and returns on SIGTERM.
        timer = threading.Timer(max(left_s, 0.1), os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        try:
            outcome = train(task, settings, work, device, is_next, Lines())
        finally:
            timer.cancel()
            task.close()
        keep(work, kept)
        copy_tokenizer(work, kept)
        save_half(task, outcome.model, kept / MODEL)
        figures = outcome.figures
        if outcome.interrupted:
            figures = task.validate(outcome.model.eval())
        entries = [entry for entry in read_journal(work / JOURNAL) if "loss" in entry.metrics]
        steps, trained_s = outcome.position.step - first, outcome.position.elapsed_s - before_s
        row: dict[str, Any] = {
            "step": outcome.position.step,
            "finished": not outcome.interrupted,
            "steps_in_piece": steps,
            "trained_s": round(trained_s, 1),
            "tokens_per_s": round(steps * task.items_per_step / trained_s),
            "tokens": outcome.position.step * task.items_per_step,
            "loss": entries[-1].metrics["loss"] if entries else None,
            **{name: round(value, 4) for name, value in figures.items()},
            "skipped": outcome.position.skipped,
            "total_s": round(outcome.position.elapsed_s, 1),
            "peak_bytes": outcome.peak_bytes,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        write_text(kept / "result.json", json.dumps(row) + "\n")
        pack(kept, out)
    return {**row, "wall_s": round(time.monotonic() - begun_s, 1)}


def main() -> int:
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(description="Trains one piece of a chat model.")
    parser.add_argument("config", help="config of the whole training, or the name of a bundled one")
    parser.add_argument("--state", type=Path, help="output of the previous piece; without it, training starts anew")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive and the result")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the piece, start-up included")
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds reserved for saving and validation")
    parser.add_argument("--steps", type=int, help="length of the whole training (overrides the config)")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    try:
        row = run_piece(arguments, begun_s)
    except RedlineError as error:
        say(f"error: {error}")
        return 2
    write_text(arguments.out / "result.json", json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
