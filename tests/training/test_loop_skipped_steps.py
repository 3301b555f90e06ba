"""Steps that are not finite are skipped, and never cost the last good checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.training.arithmetic import WorkingCopy
from redline.training.checkpoints import FOLDER
from redline.training.loop import train
from redline.training.settings import LoopSettings

from .test_loop import CPU, Lines, interrupt_at, settings


class Fragile(Lines):
    """A step with a rate above 1 is finite itself and ruins the weights for all that come after it."""

    def __init__(self, rates: LoopSettings) -> None:
        super().__init__()
        self.rate = rates.learning_rate

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"features": 6, "learning_rate": self.rate}

    def loss(self, step: int, part: int = 0) -> Tensor:
        loss = super().loss(step, part)
        ruined = any(weight.abs().max() > 1e6 for weight in self.model.parameters())
        return loss * (float("nan") if ruined else 1.0)


@pytest.mark.parametrize("keep", [2, 3])
def test_after_skipped_steps_it_resumes_from_good_weights_with_a_lower_rate(tmp_path: Path, keep: int) -> None:
    often = settings(steps=40, ema_decay=0.0, checkpoint_minutes=0.0, keep_checkpoints=keep, skip_limit=5)
    train(Fragile(often), replace(often, steps=6), tmp_path, CPU)
    mad = replace(often, learning_rate=1e20)
    with pytest.warns(UserWarning, match=r"resuming with learning_rate = 1e\+20; it was 0.02 up to step 6"):
        said = "step 12 .* not finite; the checkpoint of step 6 is kept. Resume it with a lower learning_rate or clip"
        with pytest.raises(RedlineError, match=said):
            train(Fragile(mad), mad, tmp_path, CPU, resume=True)
    # The one of step 7 was whole when it was written, and its weights were ruined.
    left = sorted(file.stem for file in (tmp_path / FOLDER).iterdir())
    assert left == ["step-000000005", "step-000000006"][1 - keep :]
    outcome = train(Fragile(often), often, tmp_path, CPU, resume=True)
    assert outcome.position.step == 40 and outcome.position.skipped == 0


def test_ruined_weights_are_not_kept_as_a_checkpoint(tmp_path: Path) -> None:
    mad = settings(steps=40, ema_decay=0.0, learning_rate=1e20, warmup_steps=0, skip_limit=5, checkpoint_minutes=0.0)
    now_s = iter(range(100_000))
    rarely = replace(mad, checkpoint_minutes=0.2)  # 12 readings of the clock: some steps after the first
    with pytest.raises(RedlineError, match=r"no checkpoint was written\. Start again with a lower learning_rate"):
        train(Fragile(mad), rarely, tmp_path, CPU, clock=lambda: float(next(now_s)))
    assert not list((tmp_path / FOLDER).glob("*"))
    # Stopped by a person, what there is is saved; it is no place to go back to either.
    stopped = train(Fragile(mad), replace(rarely, log_every=1), tmp_path, CPU, on_progress=interrupt_at(3))
    assert stopped.interrupted and stopped.position.skipped_in_a_row == 2
    with pytest.raises(RedlineError, match=r"there is no earlier checkpoint\. Start again in another folder with"):
        train(Fragile(mad), rarely, tmp_path, CPU, resume=True)


@pytest.mark.parametrize("judged", [True, False])
def test_a_training_that_ends_with_skipped_steps_has_no_result(tmp_path: Path, judged: bool) -> None:
    class Ending(Fragile):
        def validate(self, model: nn.Module) -> dict[str, float]:
            return super().validate(model) | {"loss": float(self.loss(0).detach())} if judged else {}

    mad = settings(steps=4, ema_decay=0.0, learning_rate=1e20, warmup_steps=0, skip_limit=5)
    what = "its figures are not finite" if judged else "its last loss or gradient is not finite"
    with pytest.raises(RedlineError, match=rf"ended after 4 steps, 3 of them skipped, but {what}; there is no earlier"):
        train(Ending(mad), mad, tmp_path, CPU)
    # Bad data at the end is another matter: the weights are judged, and good.
    assert train(Lines((3,)), settings(steps=4), tmp_path / "good", CPU).position.skipped == 1


def test_good_checkpoints_survive_an_interruption_during_skipped_steps(tmp_path: Path) -> None:
    often = settings(checkpoint_minutes=0.0, log_every=1, skip_limit=6, keep_checkpoints=1)
    spoilt = tuple(range(9, 60))
    stopped = train(Lines(spoilt), often, tmp_path, CPU, on_progress=interrupt_at(12))
    assert stopped.interrupted and stopped.position.skipped_in_a_row == 3
    assert sorted(file.stem for file in (tmp_path / FOLDER).iterdir()) == ["step-000000009", "step-000000012"]


class Halves(Lines):
    """In fp16 with a scale; losses of some steps are so large that their gradients overflow, of others not finite."""

    def __init__(self, too_large: tuple[int, ...] = (), spoil_at: tuple[int, ...] = ()) -> None:
        super().__init__(spoil_at)
        self.too_large, self.copy = too_large, WorkingCopy(self.model, "fp16")

    @property
    def arithmetic(self) -> WorkingCopy:
        return self.copy

    def loss(self, step: int, part: int = 0) -> Tensor:
        dtype = next(self.copy.model.parameters()).dtype
        points = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = (self.copy.model(points.to(dtype)).squeeze(1).float() - points.sum(1)).square().mean()
        return loss * (1e10 if step in self.too_large else float("nan") if step in self.spoil_at else 1.0)


def test_overflows_fixed_by_the_loss_scale_do_not_end_the_training(tmp_path: Path) -> None:
    """Four in a row, where two steps that are not finite would be too many; the fifth would be bf16's."""
    often = settings(log_every=1, skip_limit=2, checkpoint_minutes=0.0, keep_checkpoints=1, ema_decay=0.0)
    task = Halves(too_large=(8, 9, 10, 11))
    stopped = train(task, often, tmp_path, CPU, on_progress=interrupt_at(11))
    assert (stopped.position.skipped_in_a_row, stopped.position.overflowed_in_a_row) == (0, 3)
    # As long as no good step follows, the checkpoint from before is kept.
    assert sorted(file.stem for file in (tmp_path / FOLDER).iterdir()) == ["step-000000008", "step-000000011"]
    again = Halves(too_large=(8, 9, 10, 11))
    outcome = train(again, often, tmp_path, CPU, resume=True)
    assert outcome.position.step == 60 and outcome.position.skipped == 4
    assert again.copy.scale is not None and not again.copy.scale.switched and again.copy.scale.current == 256


def test_endless_overflows_switch_to_bf16_or_keep_good_weights(tmp_path: Path) -> None:
    often = settings(log_every=1, skip_limit=3, checkpoint_minutes=0.0, ema_decay=0.0)
    large, healed = Halves(too_large=tuple(range(8, 60))), settings(ema_decay=0.0, skip_limit=3)
    with pytest.warns(UserWarning, match="5 steps in a row overflowed fp16"):
        outcome = train(large, healed, tmp_path / "large", CPU)
    assert outcome.position.skipped == 5 and large.copy.scale.switched
    with (
        pytest.warns(UserWarning, match="5 steps in a row overflowed fp16"),
        pytest.raises(RedlineError, match="3 steps in a row up to step 16 .*; the checkpoint of step 7 is kept"),
    ):
        train(Halves(spoil_at=tuple(range(8, 60))), often, tmp_path / "spoilt", CPU)


@pytest.mark.parametrize(("precision", "advised"), [("fp32", False), ("bf16", True), ("fp8", True)])
def test_the_advice_depends_on_the_precision(tmp_path: Path, precision: str, advised: bool) -> None:
    """By what is computed in, which may not be what was asked for."""
    task = Lines(tuple(range(9)))
    task.precision = precision
    chosen = settings(steps=9, skip_limit=3, checkpoint_minutes=9.0, precision="bf16")
    with pytest.raises(RedlineError, match="no checkpoint was written. Start again with a lower learning_rate") as told:
        train(task, chosen, tmp_path, CPU)
    assert ('precision = "fp32"' in str(told.value)) == advised
