"""Writes the keys and values of new tokens to the pages of their rows, and computes causal attention over the pages.

A row may have one new token (decoding) or many (a prompt, or a chunk of a prompt), after any number of stored tokens.
The pages of a row are listed in its table, so rows can share pages.

T: new tokens of all rows, H: query heads, G: key and value heads, D: head dimension, N: pages, P: tokens in a page,
R: rows, E: R + 1, W: pages in the table of a row.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_integer, check_same_device, check_same_dtype, check_sizes
from redline.ops.dispatch import kernels, select
from redline.ops.paged_attention import reference, sdpa
from redline.ops.paged_attention.reference import ALL, PagedRows

__all__ = ["ALL", "IMPLEMENTATIONS", "PagedRows", "paged_attention"]

IMPLEMENTATIONS = ("auto", "reference", "sdpa", "triton")


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    rows: PagedRows,
    window: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Returns (T, H, D). A token attends to the last `window` tokens including itself; without a window, to all.

    The values in `rows` are not checked, because that would synchronize with the device.
    """
    op = "paged_attention"
    if not rows.is_checked:
        _check(op, q_THD, k_TGD, v_TGD, keys_NPGD, values_NPGD, rows, window)
        # Checked for the first layer only: the other layers pass tensors of the same shapes and dtypes.
        rows.is_checked = not torch.compiler.is_compiling()
    chosen = select(op, implementation, q_THD, implementations=IMPLEMENTATIONS, fallback="sdpa")
    module = {"sdpa": sdpa, "reference": reference}.get(chosen) or kernels(op)
    return module.paged_attention(q_THD, k_TGD, v_TGD, keys_NPGD, values_NPGD, rows, window)


def _check(
    op: str,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    rows: PagedRows,
    window: int | None,
) -> None:
    pages = {"keys_NPGD": keys_NPGD, "values_NPGD": values_NPGD}
    numbers = {"slots_T": rows.slots_T, "lengths_R": rows.lengths_R, "tables_RW": rows.tables_RW}
    sizes = check_sizes(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, **pages, **numbers, starts_E=rows.starts_E)
    heads, groups = sizes["H"], sizes["G"]
    if groups < 1 or heads % groups:
        raise ModelError(f"{op}: the {heads} query heads must be a multiple of the {groups} key and value heads.")
    if sizes["E"] != sizes["R"] + 1:
        raise ModelError(f"{op}: starts_E must have {sizes['R'] + 1} numbers for {sizes['R']} rows, not {sizes['E']}.")
    singles, prompts = (sizes["R"] if number == ALL else number for number in (rows.singles, rows.prompts))
    if not 0 <= prompts <= singles <= sizes["R"] or rows.split < 1 or (window is not None and window < 1):
        raise ModelError(
            f"{op}: prompts must be from 0 to singles, singles at most the {sizes['R']} rows, and split and window at "
            f"least 1, not {prompts}, {singles}, {rows.split} and {window}."
        )
    check_floating(op, q_THD=q_THD)
    check_same_dtype(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, **pages)
    for name, tensor in (*numbers.items(), ("starts_E", rows.starts_E)):
        check_integer(op, name, tensor)
    check_same_device(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, **pages, **numbers, starts_E=rows.starts_E)
    if keys_NPGD.stride() != values_NPGD.stride() or not (keys_NPGD.is_contiguous() and values_NPGD.is_contiguous()):
        raise ModelError(
            f"{op}: keys_NPGD and values_NPGD must be contiguous, not have the strides {keys_NPGD.stride()} and "
            f"{values_NPGD.stride()}."
        )
