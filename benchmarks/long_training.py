"""Trains a DRCT in pieces of a few minutes, with a compact state that can move between machines.

    python benchmarks/long_training.py benchmarks/long_training_x4.toml --data .carry/sr-crops --minutes 9 --out OUT
    python benchmarks/long_training.py benchmarks/long_training_x4.toml --data .carry/sr-crops --minutes 9 --out OUT \
        --state STATE_FOLDER

`--data` is a folder made by `super_resolution_data.py`, with `train` and the test sets. A piece ends before `--minutes`
are over (start-up and scoring included), on SIGTERM, or at the last step of the schedule. It writes to `--out`:
`state.pt` and `journal.jsonl`, which the next piece takes with `--state`; the averaged weights `model.safetensors` with
`model-card.md`; and `result.json`, which is also printed. Batches depend on the seed and the step only, so that the
pieces train on the same batches as an uninterrupted training.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.machine.machine import resolve_device
from redline.training.checkpoints import FOLDER, Checkpoints, compacted, read_checkpoint, write_checkpoint
from redline.training.journal import NAME as JOURNAL
from redline.training.loop import Progress, train
from redline.training.model_card import write_result
from redline.training.super_resolution import DrctTask, DrctTraining

STATE = "state.pt"
SAY_EVERY_S = 20.0


def restore(state: Path, work: Path) -> tuple[int, float]:
    """Copies the previous piece's state to where the training loop expects it; returns its step and seconds."""
    content = read_checkpoint(state / STATE)
    checkpoints = work / FOLDER
    checkpoints.mkdir(parents=True)
    shutil.copyfile(state / STATE, checkpoints / f"step-{content['step']:09}.pt")
    if (state / JOURNAL).exists():
        shutil.copyfile(state / JOURNAL, work / JOURNAL)
    return content["step"], content["elapsed_s"]


def keep(work: Path, out: Path) -> None:
    """Writes the newest checkpoint, if there is one, in its compact form, and the journal."""
    checkpoints = Checkpoints(work / FOLDER)
    if checkpoints.files():
        write_checkpoint(out / STATE, compacted(checkpoints.read()[1]))
        shutil.copyfile(work / JOURNAL, out / JOURNAL)


def run_piece(arguments: argparse.Namespace, begun_s: float) -> dict[str, Any]:
    data, out = arguments.data, arguments.out
    tests = sorted(str(path) for path in data.iterdir() if path.is_dir() and path.name != "train")
    settings = DrctTraining.read(arguments.config, photos=str(data / "train"), validation=tests, steps=arguments.steps)
    device = torch.device(resolve_device(arguments.device))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="redline-training-") as temporary:
        work = Path(temporary)
        first, before_s = restore(arguments.state, work) if arguments.state else (0, 0.0)
        task = DrctTask(settings, device)
        say(f"{task.crops.pairs.photos} images, {len(task.crops.pairs.skipped)} skipped, from step {first}")
        for sentence in task.crops.pairs.skipped[:5]:
            say(f"skipped: {sentence}")
        left_s = 60 * arguments.minutes - arguments.reserve - (time.monotonic() - begun_s)
        # The training loop saves and returns on SIGTERM.
        timer = threading.Timer(max(left_s, 0.1), os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        try:
            outcome = train(task, settings.loop, work, device, bool(arguments.state), Lines())
        finally:
            timer.cancel()
            keep(work, out)  # also after a failure
        trained_s = outcome.position.elapsed_s - before_s
        rates, losses = outcome.series("items_per_s"), outcome.series("loss")
    steps = outcome.position.step - first
    row: dict[str, Any] = {
        "step": outcome.position.step,
        "of": settings.loop.steps,
        "finished": not outcome.interrupted,
        "steps_in_piece": steps,
        "trained_s": round(trained_s, 1),
        "mean_steps_per_s": round(steps / trained_s, 2),
        "steps_per_s": round(rates[-1][1] / settings.data.batch, 2) if rates else None,
        "loss": losses[-1][1] if losses else None,
        "skipped": outcome.position.skipped,
        "total_s": round(outcome.position.elapsed_s, 1),
        "peak_bytes": outcome.peak_bytes,
        "state_bytes": (out / STATE).stat().st_size,
    }
    say(json.dumps(row))  # printed before scoring, in case scoring is killed
    result = write_result(task, outcome, out)
    for folder, seen in result.scores.items():
        row[f"{Path(folder).name}_psnr_y_db"] = round(seen.mean.psnr_y_db, 3)
    return {**row, "parameters": result.parameters, "wall_s": round(time.monotonic() - begun_s, 1)}


class Lines:
    """Prints the progress every `SAY_EVERY_S` seconds."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, seen: Progress) -> None:
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            figures = {name: round(value, 3) for name, value in seen.figures.items() if "psnr" in name}
            rate = f"{seen.learning_rate:.2e}, {seen.items_per_s:.0f} crops/s"
            say(f"step {seen.step}, loss {seen.loss:.5f}, norm {seen.gradient_norm:.3f}, rate {rate} {figures or ''}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(description="Trains one piece of a long DRCT training.")
    parser.add_argument("config", type=Path, help="settings of the whole training")
    parser.add_argument("--data", type=Path, required=True, help="folder with `train` and the test sets")
    parser.add_argument("--state", type=Path, help="output of the previous piece; without it, training starts anew")
    parser.add_argument("--out", type=Path, required=True, help="folder for state, journal, weights and result")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of the piece, start-up and scoring included"
    )
    parser.add_argument("--reserve", type=float, default=40.0, help="seconds reserved for saving and scoring")
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
