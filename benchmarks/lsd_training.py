"""Measures memory and step time of LSD training on a GPU, by stage, with and without activation checkpointing.

    python benchmarks/lsd_training.py --out FILE [--size medium] [--frame-px 64] [--batch 1] [--optimizer adamw8bit]
        [--stage distillation]

Random weights in bf16 with EMA, one stage after the other, on generated photos. The peak includes the training's
tensors only: weights, EMA, gradients, optimizer moments, activations, and the teacher in the last stage. An arm that
fails has a row with the reason. Rows are written after each arm.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from redline import RedlineError
from redline.files.atomic import write_text
from redline.ladder.search.run_log import command_line
from redline.training.ema import Ema
from redline.training.lsd.settings import STAGES, ClipSettings, LsdLoopSettings, LsdSettings, LsdTraining, StageSettings
from redline.training.lsd.task import LsdTask
from redline.training.optimizers import step_unless

STEPS, WARM_UP = 12, 4
# The starts of the later stages, such that the whole training consists of the requested stage.
BEGINNINGS = {"diffusion": (1.0, 1.0), "rollouts": (0.0, 1.0), "distillation": (0.0, 0.0)}


def settings(
    photos: Path, size: str, frame_px: int, batch: int, stage: str, optimizer: Any, recompute: bool, tiny: bool
) -> LsdTraining:
    rollouts, distillation = BEGINNINGS[stage]
    model = LsdSettings(size=size)
    if tiny:
        model = replace(model, patch=2, width=8, multipliers=(1, 2))
    return LsdTraining(
        model,
        ClipSettings(photos=str(photos), frame_px=frame_px, world_px=frame_px * 3 // 2, batch=batch),
        StageSettings(rollouts_from=rollouts, distillation_from=distillation),
        LsdLoopSettings(steps=1000, precision="fp32" if tiny else "bf16", optimizer=optimizer, checkpointing=recompute),
    )


def measure(training: LsdTraining, device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    gc.collect()
    held = 0
    if on_gpu:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    task = LsdTask(training, device)
    average, optimizer = Ema(task.averaged, training.loop.ema_decay), task.optimizer()
    seconds, loss = [], torch.zeros(())
    for step in range(STEPS):
        begun = time.perf_counter()
        loss = task.loss(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), training.loop.clip_norm)
        step_unless(~norm.isfinite(), optimizer)
        optimizer.zero_grad(set_to_none=True)
        average.update(step + 1)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if not loss.isfinite():
        raise RedlineError("the loss is not finite.")
    return {
        "parameters": sum(weight.numel() for weight in task.averaged.parameters()),
        "has_teacher": task.networks.teacher is not None,
        "step_ms": 1e3 * statistics.median(seconds[WARM_UP:]),
        "peak_bytes": torch.cuda.max_memory_allocated() - held if on_gpu else 0,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures memory and step time of LSD training, by stage.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--size", default="medium", help="size of the model")
    parser.add_argument("--frame-px", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--optimizer", action="append", help="repeatable; adamw and adamw8bit by default")
    parser.add_argument("--stage", action="append", choices=STAGES, help="repeatable; all by default")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU, as a smoke test")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    device = torch.device("cpu" if asked.tiny else "cuda")
    about: dict[str, Any] = {"gpu": "none" if asked.tiny else torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"command": command_line(sys.argv), "size": asked.size, "frame_px": asked.frame_px, "batch": asked.batch}
    optimizers = asked.optimizer or (["adamw"] if asked.tiny else ["adamw", "adamw8bit"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        pixels = torch.rand(2 * asked.frame_px, 2 * asked.frame_px, 3, generator=torch.Generator().manual_seed(0))
        Image.fromarray((pixels * 255).byte().numpy()).save(Path(folder) / "photo.png")
        for optimizer, stage, recompute in product(optimizers, asked.stage or STAGES, (True, False)):
            row = about | {"optimizer": optimizer, "stage": stage, "checkpointing": recompute}
            given = (Path(folder), asked.size, asked.frame_px, asked.batch, stage, optimizer, recompute, asked.tiny)
            try:
                row |= measure(settings(*given), device)
            except Exception as failure:  # noqa: BLE001 (reported in the arm's row)
                row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
            rows.append(row)
            write_text(asked.out, "".join(json.dumps(one) + "\n" for one in rows))
            print({key: row[key] for key in row if key not in about}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
