"""The loop that trains every kind of model: steps, schedule, average, checkpoints, figures, and a way to stop.

Nothing in a step waits for the device: losses add up there and are read every `log_every` steps. A loss or gradient
that is not finite shows in their sum, and is always looked at before a checkpoint is written, so the last one on disk
is a good one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.resident import peak_resident_bytes
from redline.training.checkpoints import NAME, Position, State
from redline.training.ema import Ema
from redline.training.interrupts import stop_requests
from redline.training.journal import NAME as JOURNAL
from redline.training.journal import Journal
from redline.training.optimizers import build_optimizer
from redline.training.schedule import Schedule
from redline.training.settings import LoopSettings
from redline.training.task import Task


@dataclass(frozen=True)
class Progress:
    """What there is to say about a running training."""

    step: int
    elapsed_s: float
    left_s: float
    loss: float
    learning_rate: float
    items_per_s: float
    unit: str
    peak_bytes: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a training ended, with the averaged weights."""

    model: nn.Module
    position: Position
    figures: dict[str, float]
    peak_bytes: int
    interrupted: bool


def train(
    task: Task,
    settings: LoopSettings,
    out: Path,
    device: torch.device,
    resume: bool = False,
    tell: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Trains until the steps or minutes are over, or somebody asks it to stop; checkpoints and figures go to `out`."""
    if not resume and (out / NAME).exists():
        raise RedlineError(f"{str(out)!r} holds a training already: resume it, or choose another folder.")
    if not resume:
        torch.manual_seed(settings.seed)
    ema, optimizer = Ema(task.model, settings.ema_decay), build_optimizer(task.model, settings, device)
    state = State(task.model, ema, optimizer, task.identity)
    before = state.load(out / NAME) if resume else Position()
    loop = _Loop(task, settings, state, out, device, tell, clock, before)
    with stop_requests() as stop:
        interrupted = loop.run(lambda: stop.requested)
    return Outcome(state.ema.model, loop.position, loop.figures, loop.peak_bytes, interrupted)


class _Loop:
    def __init__(
        self,
        task: Task,
        settings: LoopSettings,
        state: State,
        out: Path,
        device: torch.device,
        tell: Callable[[Progress], None],
        clock: Callable[[], float],
        before: Position,
    ) -> None:
        self.task, self.settings, self.state, self.device = task, settings, state, device
        self.tell, self.clock = tell, clock
        self.path, self.schedule = out / NAME, Schedule.of(settings)
        self.journal = Journal(out / JOURNAL, before.step)
        self.step, self._base_s, self._began_s = before.step, before.elapsed_s, clock()
        self.figures: dict[str, float] = self._last_figures()
        self._sums = torch.zeros(2, device=device)
        self._logged = self._saved = before.step
        self._logged_s = self._saved_s = before.elapsed_s

    @property
    def elapsed_s(self) -> float:
        return self._base_s + self.clock() - self._began_s

    @property
    def position(self) -> Position:
        return Position(self.step, self.elapsed_s)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident_bytes()

    def run(self, stop: Callable[[], bool]) -> bool:
        """True when it was stopped before its end."""
        settings = self.settings
        while self.schedule.progress(self.step, self.elapsed_s) < 1 and not stop():
            self._one_step()
            if self.step % settings.log_every == 0:
                self._log()
            if self.step % settings.validate_every == 0:
                self._validate()
            if self.elapsed_s - self._saved_s >= settings.checkpoint_minutes * 60:
                self._save()
        self._save()
        return self.schedule.progress(self.step, self.elapsed_s) < 1

    def _one_step(self) -> None:
        model, optimizer = self.state.model, self.state.optimizer
        rate = self.settings.learning_rate * self.schedule.rate(self.step, self.elapsed_s)
        for group in optimizer.param_groups:
            group["lr"] = rate
        try:
            loss = self.task.loss(self.step)
            loss.backward()
        except torch.OutOfMemoryError as error:
            raise RedlineError("the device has too little memory for this batch: take a smaller one.") from error
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.state.ema.update(model, self.step)
        self._sums += torch.stack((loss.detach().float(), _on(norm, self.device)))

    def _log(self) -> None:
        """Reads the sums, which waits for the device; refuses to go on with what is not finite."""
        steps = self.step - self._logged
        if not steps:
            return
        loss, norm = (value / steps for value in self._sums.tolist())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            kept = f"the checkpoint of step {self._saved} is untouched" if self._saved else "no checkpoint was written"
            raise RedlineError(
                f"the loss or its gradient stopped being finite between steps {self._logged} and {self.step}; {kept}. "
                'A lower learning_rate or clip_norm helps, or precision = "fp32".'
            )
        now_s = self.elapsed_s
        steps_per_s = steps / max(now_s - self._logged_s, 1e-9)
        self._sums.zero_()
        self._logged, self._logged_s = self.step, now_s
        progress = Progress(
            self.step,
            now_s,
            self.schedule.left_s(self.step, now_s, steps_per_s),
            loss,
            self.state.optimizer.param_groups[0]["lr"],
            steps_per_s * self.task.items_per_step,
            self.task.unit,
            self.peak_bytes,
            self.figures,
        )
        self._write(
            loss=loss,
            gradient_norm=norm,
            learning_rate=progress.learning_rate,
            items_per_s=progress.items_per_s,
            peak_bytes=progress.peak_bytes,
        )
        self.tell(progress)

    def _validate(self) -> None:
        self._log()
        figures = self.task.validate(self.state.ema.model)
        if figures:
            self.figures = figures
            self._write(validation=True, **figures)
        # What judging took is not the steps' time.
        self._logged_s = self.elapsed_s

    def _save(self) -> None:
        self._log()
        if self.step != self._saved or not self.path.exists():
            self.state.save(self.path, self.position)
        self._saved, self._saved_s = self.step, self.elapsed_s

    def _write(self, **values: Any) -> None:
        self.journal.write({"step": self.step, "elapsed_s": round(self.elapsed_s, 3), **values})

    def _last_figures(self) -> dict[str, float]:
        judged = [entry for entry in self.journal.entries if entry.get("validation")]
        last = judged[-1] if judged else {}
        return {name: value for name, value in last.items() if name not in ("step", "elapsed_s", "validation")}


def _on(norm: Tensor, device: torch.device) -> Tensor:
    return norm.detach().to(device, torch.float32)
