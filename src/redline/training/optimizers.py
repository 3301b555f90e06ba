"""Builds optimizers, in the same way for every kind of model.

AdamW uses the fastest implementation that this machine has (apex, fused, foreach, plain). AdamW with 8-bit moments and
Adafactor save memory. Muon orthogonalizes the updates of hidden matrices and uses AdamW for all other weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Adam, AdamW, Optimizer

from redline.errors import RedlineError
from redline.ladder.rungs.fused_optimizer import fastest_backend, implementation, rebuild
from redline.machine.quiet import quiet
from redline.training.settings import LoopSettings

_Weights = Sequence[nn.Parameter]
# Muon does not update matrices with a side below this: convolution taps, gates of a few heads, and scores.
_MIN_SIDE = 8


def build_optimizer(model: nn.Module, settings: LoopSettings) -> Optimizer:
    """Returns an optimizer over the weights of `model`, with the fastest implementation on this machine."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return build_over(weights, hidden_matrices(model), settings)


def build_over(weights: Sequence[nn.Parameter], hidden: Sequence[nn.Parameter], settings: LoopSettings) -> Optimizer:
    """Returns an optimizer over the given weights; `hidden` are the hidden matrices among them."""
    name, rate, groups = settings.optimizer, settings.learning_rate, _groups(weights, settings.weight_decay)
    if name == "muon":
        return _muon(weights, hidden, settings)
    if name == "adafactor":
        # Adafactor's default steps are relative to the size of each weight. This eps makes them as large as AdamW's.
        return Adafactor(groups, lr=rate, eps=(None, 1.0))
    if name == "adamw8bit":
        return _adamw_8bit()(groups, lr=rate, betas=settings.betas)
    optimizer = (Adam if name == "adam" else AdamW)(groups, lr=rate, betas=settings.betas)
    return rebuild(optimizer, fastest_backend(optimizer))


def check_optimizer(model: nn.Module, settings: LoopSettings) -> None:
    """Raises if the optimizer has no weights to update in this model."""
    if settings.optimizer == "muon":
        _check_hidden(hidden_matrices(model))


def describe(optimizer: Optimizer) -> str:
    """Returns a short description of the optimizer."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    words = []
    for part in parts:
        count = sum(len(group["params"]) for group in part.param_groups)
        how = f", {implementation(part)}" if isinstance(part, (Adam, AdamW)) or implementation(part) == "apex" else ""
        words.append(f"{type(part).__name__} of {count} tensors{how}")
    return " and ".join(words)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a compiled step would recompile for every new float
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def step_unless(bad: Tensor, optimizer: Optimizer) -> None:
    """Runs the step unless `bad`. Fused optimizers check `bad` on the device; others make the CPU wait for it."""
    if type(optimizer) in (Adam, AdamW) and all(group["fused"] for group in optimizer.param_groups):
        vars(optimizer)["found_inf"] = bad.float()
        optimizer.step()
    elif not bad.item():
        optimizer.step()


class CombinedOptimizer(Optimizer):
    """Several optimizers that step together."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        # Does not call Optimizer.__init__, because parameter groups and state belong to the parts.
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyrefly: ignore[bad-override]
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights that Muon updates: the large matrices between the embedding and the output layer."""
    outer = {
        id(weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] == "head"
        for weight in module.parameters()
    }
    return [weight for weight in model.parameters() if _is_large_matrix(weight) and id(weight) not in outer]


def _is_large_matrix(weight: Tensor) -> bool:
    return weight.ndim == 2 and min(weight.shape) >= _MIN_SIDE


def _groups(weights: Sequence[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Returns two groups of weights: matrices and kernels have weight decay, biases and norms do not."""
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw_8bit() -> Any:
    try:
        with quiet():
            from torchao.optim import AdamW8bit

            import_module("torch._inductor.compile_fx")  # the compiled optimizer step would import it and warn
    except ImportError as error:
        raise RedlineError("adamw8bit needs torchao, which is not installed: pip install torchao.") from error
    return AdamW8bit


def _check_hidden(hidden: _Weights) -> None:
    if not hidden:
        raise RedlineError("muon updates hidden matrices, and this model has none: use adamw.")


def _muon(weights: _Weights, hidden: _Weights, settings: LoopSettings) -> Optimizer:
    _check_hidden(hidden)
    # match_rms_adamw makes the updates as large as AdamW's, so that both share one learning rate.
    first = torch.optim.Muon(
        hidden, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    known = set(map(id, hidden))
    others = [weight for weight in weights if id(weight) not in known]
    return CombinedOptimizer([first, build_over(others, (), replace(settings, optimizer="adamw"))]) if others else first
