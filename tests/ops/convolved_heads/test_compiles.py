"""The kernels of convolved heads go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.convolved_heads.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


def compile_kernels(
    compiles: Callable[..., None], key_dim: int, value_dim: int, taps: int, name: str, documents: str, capability: int
) -> None:
    heads, channels = 12, 12 * (2 * key_dim + value_dim)
    pointers = ("x", "taps", "recent", "query", "key", "value", "query_pull", "key_pull", "value_pull")
    pointers += ("sums_pull", "x_pull", "recent_pull")
    types = dict.fromkeys(pointers, f"*{name}") | {"taps_pull": "*fp32", "documents": documents or f"*{name}"}
    forward, sums = (host._constants(taps, channels, heads, key_dim, tile) for tile in (host.FORWARD, host.SUMS))
    inputs = {"TAPS": taps, "BLOCK_S": host.INPUTS[0], "BLOCK_C": host.COLUMNS, "num_warps": host.INPUTS[1]}
    for kernel, values in (
        (host.convolved_heads_forward_kernel, forward),
        (host.convolved_heads_sums_kernel, sums),
        (host.convolved_heads_inputs_kernel, inputs),
    ):
        warps = values.pop("num_warps")
        values["HAS_DOCUMENTS"] = bool(documents)
        compiles(kernel, dict.fromkeys(kernel.arg_names, "i32") | types, values, capability, warps)


def test_compiles_for_an_h200(compiles: Callable[..., None]) -> None:
    compile_kernels(compiles, 64, 64, 4, "bf16", "*i64", 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("documents", ["", "*i32"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "taps"), [(64, 128, 4), (96, 96, 1), (5, 7, 3), (256, 256, 4), (16, 16, 16)]
)
def test_compiles_for_every_size(
    compiles: Callable[..., None],
    key_dim: int,
    value_dim: int,
    taps: int,
    documents: str,
    name: str,
    capability: int,
) -> None:
    compile_kernels(compiles, key_dim, value_dim, taps, name, documents, capability)
