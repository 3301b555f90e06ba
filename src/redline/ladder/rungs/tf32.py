"""tf32: computes fp32 matrix products on tensor cores with TF32, which has 10 mantissa bits.

By default torch enables TF32 for convolutions and disables it for matrix products, so mainly Linear layers get faster.
torch has two generations of settings for TF32: `allow_tf32` and the newer `fp32_precision`. Writing the old setting
also writes the new one, but reading the old one raises if the two disagree, and torch.compile reads both. This module
therefore sets both around each call and restores both to their exact previous values.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine

# The functions behind the attributes of torch.backends; the attributes are several times slower to read.
_read = torch._C._get_fp32_precision_getter
_write = torch._C._set_fp32_precision_setter
# A switch set to "none" inherits from ("cuda", "all"). If that is "none" too, both inherit from _EVERYTHING.
_SWITCHES = (("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
_EVERYTHING = ("generic", "all")


@dataclass
class Seen:
    """The layers that TF32 can speed up, and the number of calls with TF32 enabled."""

    products: int
    convolutions: int
    convolutions_had_it: bool
    calls: int = 0


def _own_settings() -> tuple[str, ...]:
    """Returns the value of each switch without inheritance.

    Reading a switch set to "none" returns its parent's value, so the parents are set to "none" while reading.
    """
    everything = _read(*_EVERYTHING)
    if everything != "none":
        _write(*_EVERYTHING, "none")
    cuda = _read(*_SWITCHES[0])
    if cuda != "none":
        _write(*_SWITCHES[0], "none")
    own = (cuda, *(_read(*switch) for switch in _SWITCHES[1:]))
    if cuda != "none":
        _write(*_SWITCHES[0], cuda)
    if everything != "none":
        _write(*_EVERYTHING, everything)
    return own


def _old_matmul_switch() -> bool:
    try:
        return torch._C._get_cublas_allow_tf32()
    except RuntimeError:  # raised exactly if the old setting disagrees with the new one
        return _read("cuda", "matmul") != "tf32"


def _old_cudnn_switch() -> bool:
    try:
        return torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        convolution, recurrence = (_read("cuda", op) == "tf32" for op in ("conv", "rnn"))
        # If the two settings differ, the old value cannot be read; True is the default of torch.
        return not convolution if convolution == recurrence else True


@cache
def _swallow_deprecation_warning() -> None:
    """Suppresses the deprecation warning of the old settings, which some releases emit once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _old_matmul_switch()


@contextmanager
def tf32(seen: Seen | None = None) -> Iterator[None]:
    """Enables TF32 and restores all settings of both generations on exit."""
    with _every_switch("tf32"):
        if seen is not None:
            seen.calls += _read("cuda", "matmul") == "tf32"
        yield


@contextmanager
def _every_switch(precision: str) -> Iterator[None]:
    _swallow_deprecation_warning()
    on = precision == "tf32"
    matmul_was_on, cudnn_was_on, own = _old_matmul_switch(), _old_cudnn_switch(), _own_settings()
    # Saved, because writing a switch, even with its current value, changes the matmul precision "medium" to "high".
    matmul_precision = _matmul_precision()
    if matmul_was_on != on:
        torch._C._set_cublas_allow_tf32(on)
    if cudnn_was_on != on:
        torch._C._set_cudnn_allow_tf32(on)
    for switch, value in zip(_SWITCHES, own, strict=True):
        if value != precision:
            _write(*switch, precision)
    try:
        yield
    finally:
        if matmul_was_on != on:
            torch._C._set_cublas_allow_tf32(matmul_was_on)
            if matmul_precision == "medium":
                torch._C._set_float32_matmul_precision(matmul_precision)
        if cudnn_was_on != on:
            torch._C._set_cudnn_allow_tf32(cudnn_was_on)
        for switch, value in zip(_SWITCHES, own, strict=True):
            _write(*switch, value)


# Disables TF32, also for convolutions, where torch enables it by default; restores all settings on exit.
strict_fp32 = partial(_every_switch, "ieee")


def _matmul_precision() -> str:
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:  # raised if the two generations disagree
        return ""


def _is_product(module: nn.Module) -> bool:
    """Returns whether the module owns an fp32 weight matrix: Linear, RNN, attention or a user-defined layer."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, _ConvNd)):
        return False
    own = module.named_parameters(recurse=False)
    return any("weight" in name and p.ndim >= 2 and p.dtype == torch.float32 for name, p in own)


def _look_at(model: nn.Module) -> Seen:
    """Counts the layers of the model that TF32 can speed up."""
    convolutions = sum(isinstance(m, _ConvNd) and m.weight.dtype == torch.float32 for m in model.modules())
    return Seen(sum(map(_is_product, model.modules())), convolutions, _read("cuda", "conv") == "tf32")


@dataclass(frozen=True)
class Tf32(Rung):
    name = "tf32"
    stage = Stage.FLAGS
    summary = "fp32 matrix products on tensor cores (10-bit mantissa)"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if "tf32" not in machine.hardware_dtypes:
            return f"{machine.name} has no TF32 tensor cores (NVIDIA Ampere or newer required)"
        if job is None:
            return ""
        if job.precision != "fp32":
            return f"the model computes in {job.precision}, so it has no fp32 products to speed up"
        found = _look_at(job.model)
        return "" if found.products or found.convolutions else "the model has no fp32 matrix product or convolution"

    def apply(self, job: Job) -> Job:
        seen = _look_at(job.model)
        contexts = (*job.contexts, partial(tf32, seen))
        return replace(job.with_evidence(self.name, seen), contexts=contexts, precision="tf32")

    def proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        if not seen.calls or not (seen.products or seen.convolutions):
            return ""
        before = " (enabled before by torch's default)" if seen.convolutions and seen.convolutions_had_it else ""
        return (
            f"TF32 enabled in {seen.calls} call(s), for {seen.products} layer(s) with matrix products "
            f"and {seen.convolutions} convolution(s){before}"
        )
