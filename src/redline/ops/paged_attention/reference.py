"""Reference implementation of causal attention of the new tokens of many rows over pages of keys and values.

T: new tokens of all rows, one row after the other, H: query heads, G: key and value heads, D: head dimension, N: pages,
P: tokens in a page, R: rows, E: R + 1, W: pages in the table of a row. It computes in fp32 (fp64 for fp64 input).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Stands for the number of rows in `singles` and `prompts`, so that compiled code is not specialized to this number.
ALL = -1


@dataclass(eq=False)
class PagedRows:
    """Where the new tokens of each row are, and where its keys and values are stored.

    Row r has the new tokens `starts_E[r]` to `starts_E[r + 1] - 1`, after `lengths_R[r]` stored tokens. Tokens after
    those of the last row are padding, whose output may have any value. The token at position p of row r is stored in
    page `tables_RW[r, p // P]` at place p mod P. `slots_T` is P · page + place for each new token, −1 for padding.

    Only the first `singles` rows may have one new token, and only rows from `prompts` on may have another number of new
    tokens (`ALL` stands for the number of rows); this bounds the work of the kernels. `split` is the number of
    positions that one program of the kernels reads for a row with one new token. It must not depend on the batch, so
    that a row's result does not depend on the batch either.
    """

    slots_T: Tensor
    starts_E: Tensor
    lengths_R: Tensor
    tables_RW: Tensor
    singles: int = 0
    prompts: int = 0
    split: int = 256
    # Whether the arguments of a call with these rows were checked. Later calls differ only in the layer.
    is_checked: bool = field(default=False, repr=False)
    # Data that an implementation computes from the rows in the first layer, and uses in all layers.
    prepared: Any = field(default=None, repr=False)


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    rows: PagedRows,
    window: int | None = None,
) -> Tensor:
    write(k_TGD, v_TGD, keys_NPGD, values_NPGD, rows.slots_T)
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    out_THD = torch.zeros_like(q_THD)
    starts = rows.starts_E.tolist()
    for row, length in enumerate(rows.lengths_R.tolist()):
        begin, end = starts[row], starts[row + 1]
        whole = length + end - begin
        pages = rows.tables_RW[row, : -(-whole // keys_NPGD.shape[1])]
        k_CGD, v_CGD = (held[pages].flatten(0, 1)[:whole].to(wide) for held in (keys_NPGD, values_NPGD))
        q_SGRD = q_THD[begin:end].unflatten(1, (k_TGD.shape[1], -1)).to(wide)
        scores_GRSC = torch.einsum("sgrd,cgd->grsc", q_SGRD, k_CGD) * q_THD.shape[-1] ** -0.5
        ago_SC = torch.arange(length, whole, device=q_THD.device)[:, None] - torch.arange(whole, device=q_THD.device)
        sees_SC = ago_SC >= 0 if window is None else (ago_SC >= 0) & (ago_SC < window)
        weights = scores_GRSC.masked_fill(~sees_SC, float("-inf")).softmax(-1)
        out_THD[begin:end] = torch.einsum("grsc,cgd->sgrd", weights, v_CGD).flatten(1, 2).to(q_THD.dtype)
    return out_THD


def write(k_TGD: Tensor, v_TGD: Tensor, keys_NPGD: Tensor, values_NPGD: Tensor, slots_T: Tensor) -> None:
    """Writes the new keys and values into the pages."""
    real = slots_T >= 0
    slots = slots_T[real]
    for new, held in ((k_TGD, keys_NPGD), (v_TGD, values_NPGD)):
        held.flatten(0, 1)[slots] = new[real]
