"""The training cases of claims_gpu.py: fp16 with a gradient scaler, and the rule for the learning rate by batch size.

Both train byte-level decoders on the text of claim_text.py and compare held-out losses.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from claim_cases import Bench, Row
from claim_text import decoder, draw, held_out_loss, read_text
from torch import Tensor
from torch.nn import functional as F

from redline.ladder.rungs.grad_scaler import AdaptiveGradScaler
from redline.machine.cuda_graphs import CudaGraphCapturer

# The steps over which the rate grows at the start of a training, as a share of all steps.
_WARM_UP = 0.1


def fp16_training(bench: Bench) -> list[Row]:
    """Trains the same decoder in fp32, bf16, and fp16 with and without loss scaling.

    `zero_share` is the share of gradients that are exactly zero in the last step, and `skipped` counts the steps that
    the scaler skipped because a gradient overflowed.
    """
    train, held_out = (tokens.to(bench.device) for tokens in read_text())
    length, steps, rows_of_a_batch = bench.pick((256, 300, 32), (16, 3, 2))
    rows = []
    for arm in ("fp32", "bf16", "fp16", "fp16 + grad_scaler"):
        model = decoder(bench.pick(512, 64), bench.pick(6, 1), length).to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        scaler = AdaptiveGradScaler(model) if "scaler" in arm else None
        dtype = torch.bfloat16 if arm == "bf16" else torch.float16
        random = torch.Generator().manual_seed(0)
        zeros = 0.0
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * _schedule(step, steps)
            inputs, targets = draw(train, rows_of_a_batch, length, random)
            with torch.autocast(bench.device.type, dtype, enabled=arm != "fp32"):
                loss = model.loss(inputs, targets)
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step == steps - 1:
                gradients = [weight.grad for weight in model.blocks.parameters() if weight.grad is not None]
                zeros = sum(int((g == 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif norm.isfinite():
                optimizer.step()
        row: Row = {"case": "fp16 training", "arm": arm, "steps": steps, "length": length, "zero_share": zeros}
        row["held_out_loss"] = held_out_loss(model, held_out, length)
        if scaler is not None:
            row |= {"skipped": scaler.skipped, "switched_to_bf16": scaler.switched, "final_scale": scaler.current}
        rows.append(row)
    return rows


def _schedule(step: int, steps: int) -> float:
    """Returns the factor of the learning rate: a linear start, then a linear decay."""
    return min(1.0, (step + 1) / max(1.0, _WARM_UP * steps)) * (1 - step / steps)


def rate_rule(bench: Bench) -> list[Row]:
    """Finds the best learning rate for several batch sizes, with the same number of tokens in each training.

    `points` are the batch sizes and their best rates: the vertex of a parabola through the three lowest losses over the
    logarithm of the rate. A rule in proportion to the batch grows with the power 1, one by its square root with 0.5.
    """
    train, held_out = (tokens.to(bench.device) for tokens in read_text())
    length, budget_rows = bench.pick((128, 16_384), (16, 16))
    batches = bench.pick((16, 64, 256), (4, 8))
    rates = [1e-3 * 2.0**power for power in bench.pick(range(-4, 5), range(-1, 2))]
    rows, points = [], []
    for batch in batches:
        training = _Training(bench, batch, length)
        losses = []
        for rate in rates:
            training.restart()
            random, steps = torch.Generator().manual_seed(0), budget_rows // batch
            for step in range(steps):
                training.step(rate * _schedule(step, steps), *draw(train, batch, length, random))
            losses.append(held_out_loss(training.model, held_out, length))
        best = _vertex([math.log(rate) for rate in rates], losses)
        points.append([batch, math.exp(best)])
        about: Row = {"case": "rate rule", "arm": f"batch {batch}", "rates": rates, "held_out_losses": losses}
        rows.append(about | {"steps": budget_rows // batch, "length": length, "best_rate": math.exp(best)})
    rows.append({"case": "rate rule", "arm": "best rates", "by": "batch", "points": points, "length": length})
    return rows


def _vertex(xs: list[float], ys: list[float]) -> float:
    """Returns where the parabola through the lowest point and its neighbours is lowest."""
    finite = [y if math.isfinite(y) else math.inf for y in ys]
    lowest = min(range(len(ys)), key=finite.__getitem__)
    if not 0 < lowest < len(ys) - 1 or not all(map(math.isfinite, finite[lowest - 1 : lowest + 2])):
        return xs[lowest]
    before, middle, after = finite[lowest - 1 : lowest + 2]
    curvature = before - 2 * middle + after
    step = xs[lowest + 1] - xs[lowest]
    return xs[lowest] + (step * (before - after) / (2 * curvature) if curvature > 0 else 0.0)


class _Training:
    """Trains a small decoder with AdamW; on a GPU a step is one CUDA graph, whose learning rate is a tensor."""

    def __init__(self, bench: Bench, batch: int, length: int) -> None:
        self.model = decoder(bench.pick(256, 64), bench.pick(4, 1), length).to(bench.device)
        self._start = [weight.detach().clone() for weight in self.model.parameters()]
        self._rate = torch.zeros((), device=bench.device)
        options: dict[str, Any] = {"capturable": True, "fused": True} if bench.on_gpu else {}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=self._rate, weight_decay=0.01, **options)
        self._inputs = torch.zeros(batch, length, dtype=torch.int64, device=bench.device)
        self._targets = torch.zeros_like(self._inputs)
        self._run: Callable[[], object] = self._eager
        if bench.on_gpu:
            capturer = CudaGraphCapturer(torch.device("cuda", torch.cuda.current_device()))
            for _ in range(3):
                capturer.warm_up(self._eager)
            _, self._run = capturer.capture(self._eager)

    def _eager(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        logits = self.model(self._inputs)
        F.cross_entropy(logits.flatten(0, 1), self._targets.flatten()).backward()
        self._optimizer.step()

    def step(self, rate: float, inputs: Tensor, targets: Tensor) -> None:
        self._rate.fill_(rate)
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._run()

    def restart(self) -> None:
        """Restores the first weights and clears the optimizer's moments and step counts."""
        with torch.no_grad():
            for weight, start in zip(self.model.parameters(), self._start, strict=True):
                weight.copy_(start)
            for state in self._optimizer.state.values():
                for value in state.values():
                    value.zero_()
