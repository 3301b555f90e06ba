"""The training loop for every kind of model: steps, schedule, averaged weights, checkpoints, logging and interruption.

If the optimizer can skip a step on the device, no step waits for the device: losses are summed on the device and read
every `log_every` steps. A step whose loss or gradient is not finite changes no weight and is counted; `skip_limit` such
steps in a row end the run. While steps are being skipped, no periodic checkpoint replaces the last good checkpoint.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.files.partial import claimed
from redline.machine.host_memory import peak_resident_bytes
from redline.machine.memory import is_out_of_memory
from redline.machine.quiet import unadvised
from redline.training.checkpoints import FOLDER, Checkpoints, Position, State
from redline.training.ema import Ema
from redline.training.interrupts import stop_requests
from redline.training.journal import NAME as JOURNAL
from redline.training.journal import Entry, Journal
from redline.training.optimizers import set_rate, step_unless
from redline.training.settings import LoopSettings
from redline.training.task import Task
from redline.training.tensorboard import TensorBoard

# The lock file in the output folder, which only one training run may use at a time.
_OWNER = ".training"


@dataclass(frozen=True)
class Progress:
    """The metrics of one log line. `utilization` is the achieved FLOP/s divided by the measured peak.

    `loss` is the mean training loss since the last line; it includes the `penalties`.
    """

    step: int
    elapsed_s: float
    left_s: float
    loss: float
    gradient_norm: float
    learning_rate: float
    items_per_s: float
    unit: str
    peak_bytes: int
    utilization: float | None = None
    skipped: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    penalties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a training run ended. `model` has the averaged weights if the run averages them.

    `entries` are all entries of the journal. `stop_signal` is the number of the signal that interrupted the run.
    """

    model: nn.Module
    position: Position
    figures: dict[str, float]
    peak_bytes: int
    interrupted: bool
    stop_signal: int | None = None
    entries: Sequence[Entry] = ()

    @property
    def loss(self) -> float | None:
        """The last training loss in the journal."""
        return next((entry.metrics["loss"] for entry in reversed(self.entries) if "loss" in entry.metrics), None)

    def series(self, metric: str) -> tuple[tuple[int, float], ...]:
        """Returns the steps and the finite values of a metric in the journal."""
        found = ((entry.step, entry.metrics.get(metric)) for entry in self.entries)
        return tuple((step, value) for step, value in found if value is not None)

    def median(self, metric: str) -> float | None:
        """Returns the median of a metric over the journal, without its first entry, which includes compilation."""
        values = [value for _, value in self.series(metric)]
        return statistics.median(values[1:] or values) if values else None


def train(
    task: Task,
    settings: LoopSettings,
    out: Path,
    device: torch.device,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
    ceiling_flops_per_s: float | None = None,
    board: TensorBoard | None = None,
) -> Outcome:
    """Trains for the set steps or minutes, or until a signal; writes checkpoints and the journal to `out`.

    `on_progress` is called with every log line, `board` with every entry of the journal.
    """
    with claimed(out / _OWNER, f"a training run is writing to {str(out)!r}: wait for it, or choose another folder."):
        if device.type == "cuda":
            # The peak memory of the run must not include that of the search for a batch size.
            torch.cuda.reset_peak_memory_stats(device)
        checkpoints = Checkpoints(out / FOLDER, settings.keep_checkpoints)
        checkpoints.check_start(resume)
        if not resume:
            torch.manual_seed(settings.seed)
        ema = Ema(task.averaged, settings.ema_decay) if settings.ema_decay else None
        state = State(task.model, ema, task.optimizer(), task.arithmetic, task.identity)
        before = checkpoints.load(state) if resume else Position()
        loop = _Loop(task, settings, state, checkpoints, device, on_progress, clock, before, ceiling_flops_per_s, board)
        with unadvised(), warnings.catch_warnings(), stop_requests() as stop:
            # Suppresses a warning that prints a page of C++ output; Redline has already warned about slow dtypes.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            interrupted = loop.run(lambda: stop.signal is not None)
        entries = loop.journal.entries
        return Outcome(loop.result, loop.position, loop.figures, loop.peak_bytes, interrupted, stop.signal, entries)


@dataclass
class _Loop:
    task: Task
    settings: LoopSettings
    state: State
    checkpoints: Checkpoints
    device: torch.device
    on_progress: Callable[[Progress], None]
    clock: Callable[[], float]
    before: Position
    ceiling_flops_per_s: float | None
    board: TensorBoard | None = None

    def __post_init__(self) -> None:
        before, device = self.before, self.device
        if self.board:
            self.board.starting_after(before.step)
        self.journal = Journal(self.checkpoints.folder.parent / JOURNAL, before.step)
        self.step, self.skipped = before.step, before.skipped
        self._base_s, self._began_s = before.elapsed_s, self.clock()
        self.figures, self._validated = self._last_figures()
        # Both tensors stay on the device. `_sums` holds the sums of losses, gradient norms and finite steps since the
        # last log line. `_row` holds the steps skipped in a row, the overflows in a row (the loss scale adapts to
        # them), and the largest number of steps skipped in a row since the last log line.
        self._sums = torch.tensor(before.unlogged_sums, dtype=torch.float32, device=device)
        in_a_row = (before.skipped_in_a_row, before.overflowed_in_a_row, before.skipped_in_a_row)
        self._row = torch.tensor(in_a_row, dtype=torch.float32, device=device)
        self._logged, self._saved = before.step - before.unlogged_steps, before.step
        # The throughput is measured from this step and this time on.
        self._timed, self._timed_s = before.step, before.elapsed_s
        self._saved_s = before.elapsed_s

    @property
    def elapsed_s(self) -> float:
        return self._base_s + self.clock() - self._began_s

    @property
    def position(self) -> Position:
        skipped, overflowed, _ = map(round, self._row.tolist())
        loss, norm, good = self._sums.tolist()
        unlogged = self.step - self._logged
        return Position(self.step, self.elapsed_s, self.skipped, skipped, overflowed, unlogged, (loss, norm, good))

    @property
    def result(self) -> nn.Module:
        return self.state.ema.model if self.state.ema else self.task.averaged

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident_bytes()

    def run(self, stop: Callable[[], bool]) -> bool:
        """Trains until the end or until `stop()` is true. Returns whether the run was stopped before its end."""
        settings = self.settings
        while self.settings.progress(self.step, self.elapsed_s) < 1 and not stop():
            self._one_step()
            if self.step % settings.log_every == 0:
                self._log()
            elif self.step % settings.skip_limit == 0:
                self._check_finite(float(self._row[2]))
            if self.step % settings.validate_every == 0:
                self._validate()
            if self.elapsed_s - self._saved_s >= settings.checkpoint_minutes * 60:
                if self._is_in_doubt():
                    self._check_finite(float(self._row[2]))
                else:
                    self._save()
        interrupted = self.settings.progress(self.step, self.elapsed_s) < 1
        if interrupted:
            self._check_finite(float(self._row[2]))
        else:
            self._log()
        self._save()
        if not interrupted:
            if self.step != self._validated:
                # The validation runs after saving, because it is not part of the training state.
                self._validate()
            self._check_end()
        return interrupted

    def _one_step(self) -> None:
        try:
            self._step()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise RedlineError("out of memory: lower batch under [data].") from error
            raise

    def _step(self) -> None:
        model, optimizer, arithmetic = self.state.model, self.state.optimizer, self.state.arithmetic
        set_rate(optimizer, self.settings.learning_rate * self.settings.rate_factor(self.step, self.elapsed_s))
        total = torch.zeros((), device=self.device)
        with self.task.around():
            for part in range(self.task.parts):
                total += self.task.backward(self.step, part, arithmetic).float()
        overflowed = arithmetic.unscale(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip_norm).to(self.device, torch.float32)
        bad = ~(total + norm).isfinite() | overflowed
        step_unless(bad, optimizer)
        optimizer.zero_grad(set_to_none=True)
        arithmetic.publish()
        self.step += 1
        if self.state.ema:
            self.state.ema.update(self.step)
        self._count(total, norm, bad, overflowed)

    def _count(self, loss: Tensor, norm: Tensor, bad: Tensor, overflowed: bool) -> None:
        self._sums += torch.stack((loss, norm, torch.ones_like(loss))).where(~bad, 0.0)
        skipped = (self._row[0] + (not overflowed)) * bad
        self._row = torch.stack((skipped, (self._row[1] + overflowed) * bad, torch.maximum(self._row[2], skipped)))

    def _log(self) -> None:
        """Logs the mean over the steps since the last line; reading the sums waits for the device.

        Logs at fixed steps and at the end. Unlike checkpoints, log lines never depend on the clock, so that equal
        training runs write equal journals, even if they were interrupted and resumed.
        """
        steps = self.step - self._logged
        if not steps:
            return
        loss, norm, good, _, _, worst = torch.cat((self._sums, self._row)).tolist()
        self.skipped += steps - round(good)
        loss, norm = (value / good if good else math.nan for value in (loss, norm))
        self._check_finite(worst)
        now_s = self.elapsed_s
        steps_per_s = (self.step - self._timed) / max(now_s - self._timed_s, 1e-9)
        self._sums.zero_()
        self._row[2] = self._row[0]
        self._logged = self._timed = self.step
        self._timed_s = now_s
        items_per_s = steps_per_s * self.task.items_per_step
        used, ceiling = items_per_s * self.task.flops_per_item, self.ceiling_flops_per_s
        figures: dict[str, Any] = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": float(self.state.optimizer.param_groups[0]["lr"]),
            "items_per_s": items_per_s,
            "peak_bytes": self.peak_bytes,
            "utilization": used / ceiling if used and ceiling else None,
            "skipped": self.skipped,
        }
        left_s, penalties = self.settings.left_s(self.step, now_s, steps_per_s), self.task.penalties(self.step - 1)
        self._write(figures, penalties=penalties)
        about = {"unit": self.task.unit, "figures": self.figures, "penalties": penalties}
        self.on_progress(Progress(step=self.step, elapsed_s=now_s, left_s=left_s, **figures, **about))

    def _check_finite(self, in_a_row: float) -> None:
        if in_a_row < self.settings.skip_limit:
            return
        raise RedlineError(
            f"{round(in_a_row)} steps in a row up to step {self.step} had a loss or gradient that is not finite; "
            + self._advice()
        )

    def _check_end(self) -> None:
        """Raises an error if the run has no usable result.

        A result is unusable if a metric is NaN, or if the last step was skipped and metrics are missing or infinite.
        """
        is_skipping = bool(self._row[0] > 0)
        is_lost = any(map(math.isnan, self.figures.values()))
        if is_lost or (is_skipping and not all(map(math.isfinite, self.figures.values() or (math.nan,)))):
            what = "its metrics are not finite" if self.figures else "its last loss or gradient is not finite"
            raise RedlineError(
                f"training ended after {self.step} steps, {self.skipped} of them skipped, but {what}; " + self._advice()
            )

    def _advice(self) -> str:
        """Returns what to do after steps that were not finite.

        Deletes the checkpoints after which all steps were skipped, because their weights may be the cause. Keeps them
        if there is no older checkpoint.
        """
        skipped = round(float(self._row[:2].sum()))
        kept = self.checkpoints.go_back_before(self.step - skipped if skipped else self.step + 1)
        if kept:
            where = f"the checkpoint of step {kept} is kept. Resume it"
        elif self.checkpoints.files():
            where = "there is no earlier checkpoint. Start again in another folder"
        else:
            where = "no checkpoint was written. Start again"
        helps = "" if self.task.precision == "fp32" else ', or precision = "fp32"'
        return f"{where} with a lower learning_rate or clip_norm{helps}."

    def _is_in_doubt(self) -> bool:
        """Returns whether the last step was skipped: weights that are already bad can be the reason."""
        return bool(self._row[:2].sum() > 0)

    def _validate(self) -> None:
        self._log()
        was_training = self.result.training
        figures = self.task.validate(self.result.eval())
        self.result.train(was_training)
        if figures:
            self.figures = figures
            self._write(figures, is_validation=True)
        self._validated = self.step
        # The time of the validation does not count for the throughput.
        self._timed_s = self.elapsed_s

    def _save(self) -> None:
        if self.step != self._saved or not self.checkpoints.files():
            self.checkpoints.save(self.state, self.position, keep_all=self._is_in_doubt())
        self._saved, self._saved_s = self.step, self.elapsed_s

    def _write(
        self, metrics: Mapping[str, float | None], is_validation: bool = False, penalties: tuple[str, ...] = ()
    ) -> None:
        entry = Entry(self.step, round(self.elapsed_s, 3), metrics, is_validation, penalties)
        self.journal.write(entry)
        if self.board:
            self.board(entry)

    def _last_figures(self) -> tuple[dict[str, float], int]:
        """Returns the metrics and the step of the last validation in the journal."""
        last = next((entry for entry in reversed(self.journal.entries) if entry.is_validation), Entry(0, 0.0, {}))
        # None in the journal stands for a metric that was not finite.
        return {name: math.nan if value is None else value for name, value in last.metrics.items()}, last.step
