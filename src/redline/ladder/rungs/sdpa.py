"""sdpa: replaces hand-written attention by `scaled_dot_product_attention` and chooses its fastest kernel.

Hand-written softmax attention writes its scores (queries × keys) to memory and reads them three times; a fused kernel
does not store them. The rung replaces hand-written attention where it can prove that the results are equal. torch has
several fused kernels and uses the first that supports the inputs, not the fastest; `backend=auto` times them and
writes the fastest into the plan.
"""

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.ladder.job import Context, Job, entered
from redline.ladder.rewrites.attention import AttentionCall, observe
from redline.ladder.rewrites.attention_rewrite import fuse
from redline.ladder.rewrites.attention_switch import Rewriting, switch_to_fused
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
_REPEATS = 10


class _Prefer:
    """Gives one kernel priority during a call; the others stay enabled for shapes it does not support.

    Sets only the priority order, and enables the kernel if necessary. `torch.nn.attention.sdpa_kernel` would enable or
    disable every kernel, which is much slower.
    """

    def __init__(self, backend: str) -> None:
        self.first = int(BACKENDS[backend].value)
        switch = {"efficient": "mem_efficient"}.get(backend, backend)
        self.enabled = getattr(torch._C, f"_get_{switch}_sdp_enabled")
        self.enable = getattr(torch._C, f"_set_sdp_use_{switch}")

    def __enter__(self) -> None:
        self.order, self.was_enabled = torch._C._get_sdp_priority_order(), self.enabled()
        torch._C._set_sdp_priority_order([self.first, *(b for b in self.order if b != self.first)])
        if not self.was_enabled:
            self.enable(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_sdp_priority_order(self.order)
        if not self.was_enabled:
            self.enable(False)


def _context(backend: str) -> Context:
    # torch uses the math kernel only if no other kernel can run, so `math` disables the others.
    return (lambda: sdpa_kernel(SDPBackend.MATH)) if backend == "math" else (lambda: _Prefer(backend))


@dataclass(frozen=True)
class Sdpa(Rung):
    name = "sdpa"
    stage = Stage.STRUCTURE
    summary = "fused attention instead of hand-written attention, with the fastest kernel"

    backend: str = option(
        "auto",
        "the kernel to prefer; auto times all of them, default leaves the choice to torch",
        ("auto", *BACKENDS, "default"),
    )
    dtype: str = option(
        "auto",
        "dtype in which auto times the kernels; auto is bf16 if the GPU supports it",
        ("auto", "bf16", "fp16", "fp32"),
    )

    @property
    def autotunes(self) -> bool:
        return self.backend == "auto"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if self.backend in BACKENDS and self.backend not in machine.attention_kernels:
            there = ", ".join(machine.attention_kernels)
            return f"{machine.name} has no {self.backend} attention kernel (available: {there})"
        if job is None or not job.samples:
            return ""
        seen = observe(job)
        if not seen.calls and not seen.handwritten:
            if any(isinstance(module, nn.MultiheadAttention) for module in job.model.modules()):
                one = "which is one operation without a choice of kernels"
                return f"nn.MultiheadAttention uses its fast path here, {one}"
            return "no attention found: no scaled_dot_product_attention and no softmax between two matrix products"
        if not seen.handwritten and self.backend in ("auto", "default") and not machine.is_cuda:
            return "the attention of the model is already fused, and this device has only one kernel for it"
        return ""

    def resolve(self, job: Job) -> "Sdpa":
        if self.backend != "auto":
            return self
        if job.device.type != "cuda" or not job.samples:
            return replace(self, backend="default")
        machine = Machine.detect(str(job.device))
        dtype = self.dtype if self.dtype != "auto" else ("bf16" if "bf16" in machine.hardware_dtypes else "fp32")
        # Rewrites the model temporarily, to find the shapes of its attention calls; `apply` rewrites it again.
        rewriting = _rewrite(job)
        try:
            calls = observe(job).calls
        finally:
            rewriting.undo()
        candidates = [name for name in ("cudnn", "flash", "efficient") if name in machine.attention_kernels]
        times = {name: _total_seconds(name, calls, DTYPES[dtype], job.device, job.training) for name in candidates}
        best = min(times, key=lambda name: times[name]) if calls and times else "default"
        return replace(self, backend=best, dtype=dtype)

    def apply(self, job: Job) -> Job:
        if self.backend not in ("auto", "default"):
            job = replace(job, contexts=(*job.contexts, _context(self.backend)))
        if not job.samples:
            if any("softmax" in type(m).forward.__code__.co_names for m in job.model.modules() if _own(m)):
                said = "sdpa: hand-written attention stays unchanged: proving equality needs samples=."
                warnings.warn(said, stacklevel=2)
            return job
        rewriting = _rewrite(job)
        return job.with_evidence(self.name, (observe(job).calls, rewriting))

    def why_no_proof(self, job: Job) -> str:
        _, rewriting = job.evidence.get(self.name, ({}, Rewriting()))
        return f"unchanged: {rewriting.reasons}" if rewriting.left else ""

    def proof(self, job: Job) -> str:
        calls, rewriting = job.evidence.get(self.name, ({}, Rewriting()))
        if not calls or not (rewriting.done or self.backend in BACKENDS):
            return ""
        parts = []
        if rewriting.done:
            parts.append(f"{_count(len(rewriting.done), 'attention module')} rewritten ({rewriting.examples})")
        if rewriting.left:
            parts.append(f"{len(rewriting.left)} unchanged: {rewriting.reasons}")
        dtype = _dtype(job)
        kernels: Counter[str] = Counter()
        for seen, count in calls.items():
            kernels[_kernel(job, seen, dtype)] += count
        ran = ", ".join(f"{_count(count, 'call')} with the {kernel} kernel" for kernel, count in kernels.items())
        name = next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
        return "; ".join([*parts, f"a forward pass makes {ran} in {name}"])


def _rewrite(job: Job) -> Rewriting:
    """Makes the model use fused attention wherever equality is proven."""
    return switch_to_fused(job) + fuse(job.model, observe(job), job.training)


def _dtype(job: Job) -> torch.dtype:
    """Returns the dtype of attention under the whole plan; int8 and fp8 weights do not change it."""
    floats = Counter(p.dtype for p in job.model.parameters() if p.dtype in DTYPES.values())
    common = floats.most_common(1)[0][0] if floats else torch.float32
    return DTYPES.get(job.precision, common)


def _own(module: torch.nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.") and hasattr(type(module).forward, "__code__")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kernel(job: Job, seen: AttentionCall, dtype: torch.dtype) -> str:
    """Returns the kernel that the dispatcher chooses under the settings and the final dtype of the plan."""
    given = seen.inputs(dtype, job.device, gradients=job.training)
    with torch.set_grad_enabled(job.training), entered(job.contexts):
        chosen = torch._fused_sdp_choice(**given)
    return next((name for name, backend in BACKENDS.items() if backend.value == chosen), f"number {chosen}")


def _total_seconds(
    backend: str, calls: dict[AttentionCall, int], dtype: torch.dtype, device: torch.device, training: bool
) -> float:
    """Returns the time of all attention calls of one forward pass; infinite if the kernel does not support a shape."""

    def step(given: dict[str, Any]) -> None:
        output = F.scaled_dot_product_attention(**given)
        if training:
            torch.autograd.grad(output, [given[name] for name in ("query", "key", "value")], output)

    total = 0.0
    for seen, count in calls.items():
        run = functools.partial(step, seen.inputs(dtype, device, training))
        try:
            with sdpa_kernel(BACKENDS[backend]), torch.set_grad_enabled(training), warnings.catch_warnings():
                # A kernel that cannot run emits warnings before it raises; the error is sufficient.
                warnings.simplefilter("ignore")
                total += count * _seconds(run, device)
        except RuntimeError:
            return float("inf")
    return total


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    with torch.cuda.device(device):
        for _ in range(3):
            step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize(device)
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[_REPEATS // 2] * 1e-3
