"""A recorded forward and backward trains exactly as the plain one does, whatever happens to gradients in between."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.machine.cuda_graphs import CudaGraphCapturer
from redline.training.captured_gradients import CapturedGradients
from redline.training.loop import train
from redline.training.super_resolution import DrctTask, DrctTraining
from synthetic_photos import save_synthetic_photos


class FakeRecorder:
    """Replays as a graph does: into the memory of what was recorded, from nothing but the buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rehearsed = model, 0

    def supports(self, tensors: list[Tensor]) -> bool:
        return True

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.rehearsed += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        output = run()
        recorded = [weight.grad for weight in self.model.parameters()]

        def replay() -> None:
            output.copy_(run())
            for weight, gradient in zip(self.model.parameters(), recorded, strict=True):
                if gradient is not None:
                    gradient.copy_(weight.grad)
                    weight.grad = None

        return output, replay

    def pool_bytes(self) -> int:
        return 0


def make(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, device=device)))
    return model


def trajectory(model: nn.Module, gradients: Callable[[Tensor, Tensor], Tensor], device: str = "cpu") -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    random = torch.Generator().manual_seed(2)
    for _ in range(6):
        batch = (torch.randn(7, size, generator=random).to(device) for size in (5, 3))
        losses.append(gradients(*batch).item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # changes gradients in place
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def plainly(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def gradients(given: Tensor, wanted: Tensor) -> Tensor:
        loss = F.mse_loss(model(given), wanted)
        loss.backward()
        return loss.detach()

    return gradients


def test_recorded_is_plain_bit_for_bit() -> None:
    plain, model = make(), make()
    recorder = FakeRecorder(model)
    recorded = CapturedGradients(model, lambda given, wanted: F.mse_loss(model(given), wanted), recorder)
    assert trajectory(model, recorded) == trajectory(plain, plainly(plain))
    assert recorder.rehearsed == 3
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_of_another_shape_is_refused() -> None:
    model = make()
    recorded = CapturedGradients(model, lambda given: model(given).sum(), FakeRecorder(model))
    recorded(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"\(1, 5\), not \(2, 5\)"):
        recorded(torch.ones(1, 5))


@pytest.mark.gpu
def test_recorded_is_plain_on_a_gpu() -> None:
    plain, model = make("cuda"), make("cuda")

    def loss(given: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(model(given), wanted)

    recorded = CapturedGradients(model, loss, CudaGraphCapturer(torch.device("cuda")))
    found, expected = trajectory(model, recorded, "cuda"), trajectory(plain, plainly(plain), "cuda")
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_gradients_equal_plain_ones(compiled: bool, tmp_path: Path) -> None:
    save_synthetic_photos(tmp_path / "photos", 2, 96, 96, seed=1)
    (tmp_path / "tiny.toml").write_text(
        "[model]\nscale = 2\ngroups = 1\nwidth = 16\ngrowth = 8\nfeatures = 16\nwindow = 8\n"
        f"[data]\nphotos = '{tmp_path}/photos'\ncrop_px = 16\nbatch = 4\n"
        "[training]\nsteps = 12\nprecision = 'bf16'\nlog_every = 1\n"
    )
    settings, gpu, losses = DrctTraining.read(tmp_path / "tiny.toml"), torch.device("cuda"), []
    for recorded in (False, True):
        loop = replace(settings.loop, cuda_graph=recorded, compile=compiled)
        task, seen = DrctTask(replace(settings, loop=loop), gpu), []
        train(
            task,
            loop,
            tmp_path / str(recorded),
            gpu,
            on_progress=lambda progress, seen=seen: seen.append(progress.loss),
        )
        losses.append(seen)
    assert len(losses[0]) == 12 and losses[1] == pytest.approx(losses[0], rel=0.02)
