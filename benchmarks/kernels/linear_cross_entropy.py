"""Times a linear layer with cross-entropy against eager PyTorch, torch.compile and Liger, in bf16.

    python benchmarks/kernels/linear_cross_entropy.py --out FILE [--sweep]

The head of Llama 3 8B, and that of a training step of a 124M model. Peak memory excludes the inputs. `--sweep` times
chunk sizes, the dtype in which the weight's gradient is summed, and cuBLASLt for the matrix products.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from arms import Case, Run, both, forward, main, with_values
from torch import Tensor
from torch.nn import functional as F

from redline.ops.linear_cross_entropy import linear_cross_entropy, reference

SIZES = ((8192, 4096, 128_256), (65_536, 768, 50_304), (8192, 2048, 50_257))
# Error of bf16 gradients against fp32: the logits and their gradients are rounded.
LARGEST_ERROR = 0.02


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def liger() -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional

    return functional.liger_fused_linear_cross_entropy


FUNCTIONS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "eager": lambda: eager,
    "torch.compile": lambda: torch.compile(eager, fullgraph=True, dynamic=False),
    "liger": liger,
    "redline": lambda: partial(linear_cross_entropy, implementation="triton"),
}


def case(rows: int, features: int, classes: int, backward: bool) -> Case:
    hidden = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, features, device="cuda") * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    grad = torch.ones((), device="cuda")

    def run(function: Callable[..., Tensor], *given: Tensor) -> Run:
        inputs = (*(given or (hidden, weight)), target)
        return both(function, inputs, (grad,)) if backward else forward(function, inputs)

    def expected() -> tuple[Tensor, ...]:
        exact = (tensor.detach().float().requires_grad_() for tensor in (hidden, weight))
        return run(reference.linear_cross_entropy, *exact)()

    return Case(
        name=f"linear_cross_entropy {'forward+backward' if backward else 'forward'}",
        sizes={"rows": rows, "features": features, "classes": classes, "dtype": "bf16"},
        arms={name: lambda make=make: run(make()) for name, make in FUNCTIONS.items()},
        expected=expected,
        largest_error=LARGEST_ERROR,
        asks_the_host=("liger",),
        needed_flop=(3 if backward else 1) * 2 * rows * features * classes,
    )


def cases() -> Iterable[Case]:
    for size in SIZES:
        for backward in (True, False):
            yield case(*size, backward)


def by_library(name: str, run: Run) -> Run:
    """Returns the run with another BLAS library for matrix products."""

    def call() -> tuple[Tensor, ...]:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(name)
        try:
            return run()
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return call


def sweep() -> Iterable[Case]:
    from redline.ops.linear_cross_entropy import chunks

    for size in SIZES[:2]:
        plain = case(*size, True)
        build = plain.arms["redline"]
        arms: dict[str, Callable[[], Run]] = {
            "as shipped": build,
            "as shipped, by cublaslt": lambda build=build: by_library("cublaslt", build()),
        }
        for mib in (512, 1024, 2048, 4096):
            sizes: dict[str, object] = {"CHUNK_BYTES": mib * 2**20, "CHUNK_ROWS": 2**31}
            for name, values in (
                ("", {}),
                (", sums in bf16", {"SUM_DTYPE": torch.bfloat16}),
            ):
                chosen = sizes | values
                arms[f"{mib} MiB{name}"] = lambda chosen=chosen, build=build: with_values(chunks, chosen, build())
        yield replace(plain, name=f"sweep of {plain.name}", arms=arms)


if __name__ == "__main__":
    sys.exit(main("linear_cross_entropy", cases, sweep))
