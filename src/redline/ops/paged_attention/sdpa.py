"""Computes paged attention on CPUs with PyTorch's `scaled_dot_product_attention`.

Rows with one new token are computed together, in groups of similar length; rows with more are computed one by one. The
keys and values are first copied out of the pages, because `scaled_dot_product_attention` does not read pages.

The shapes are those of `reference.py`; B: rows of a group, C: positions, S: new tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.paged_attention.reference import PagedRows


@dataclass(eq=False)
class _Singles:
    """A group of rows that have one new token each.

    `tokens_B` holds the index of each row's new token, and `pages_X` the pages to read, one row after the other.
    The keys and values of the first `places` positions of each row are read. `empty_E` holds the indices of the
    positions without a token, counted over all rows. `ago_BC` is the number of positions from each position to the new
    token, negative after the new token. `masks` caches the mask for each window.
    """

    tokens_B: Tensor
    pages_X: Tensor
    places: int
    empty_E: Tensor
    ago_BC: Tensor
    masks: dict[int | None, Tensor]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the mask (B, 1, 1, C) that is added to the scores, or None if the token attends to every place."""
        if len(self.tokens_B) == 1 and window is None:
            return None
        if window not in self.masks:
            sees_BC = self.ago_BC >= 0 if window is None else (self.ago_BC >= 0) & (self.ago_BC < window)
            bias_BC = torch.zeros(sees_BC.shape, dtype=dtype).masked_fill_(~sees_BC, float("-inf"))
            self.masks[window] = bias_BC[:, None, None]
        return self.masks[window]

    def gather(self, held_NPGD: Tensor) -> Tensor:
        """Returns the keys or values of the rows, (B, C, G, D)."""
        found = held_NPGD.index_select(0, self.pages_X).flatten(0, 1)
        if len(self.tokens_B) == 1:
            return found[None, : self.places]
        # Places without a token may hold NaN, which a mask would not remove.
        found.index_fill_(0, self.empty_E, 0)
        return found.unflatten(0, (-1, self.places))


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A row with the new tokens from `begin` to `end - 1`. `whole` counts its stored and new tokens."""

    begin: int
    end: int
    whole: int
    pages_W: Tensor


@dataclass(frozen=True, eq=False)
class _Prepared:
    # The new tokens that are not padding, and their slots.
    real_T: Tensor
    slots_T: Tensor
    singles: list[_Singles]
    prompts: list[_Prompt]


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    rows: PagedRows,
    window: int | None = None,
) -> Tensor:
    """Computes the same as the reference."""
    if torch.compiler.is_compiling():
        numbers = (rows.slots_T, rows.starts_E, rows.lengths_R, rows.tables_RW)
        return _opaque(q_THD, k_TGD, v_TGD, keys_NPGD, values_NPGD, *numbers, window or 0)
    if rows.prepared is None:
        rows.prepared = _prepare(rows, keys_NPGD.shape[1])
    prepared: _Prepared = rows.prepared
    for new, held in ((k_TGD, keys_NPGD), (v_TGD, values_NPGD)):
        held.flatten(0, 1).index_copy_(0, prepared.slots_T, new.index_select(0, prepared.real_T))
    out_THD = torch.zeros_like(q_THD)
    groups = k_TGD.shape[1]
    for part in prepared.singles:
        k, v = part.gather(keys_NPGD), part.gather(values_NPGD)
        # The query heads that share a key head are passed as several queries of one head, so keys are not repeated.
        q = q_THD[part.tokens_B].unflatten(1, (groups, -1))
        mask = part.mask(window, q.dtype)
        mixed = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        out_THD[part.tokens_B] = mixed.flatten(1, 2)
    for prompt in prepared.prompts:
        out_THD[prompt.begin : prompt.end] = _attend(q_THD, keys_NPGD, values_NPGD, prompt, window)
    return out_THD


@torch.library.custom_op("redline::paged_attention_on_cpu", mutates_args=("keys", "values"))
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    window: int,
) -> Tensor:
    """Runs `paged_attention` as a custom op, which compilers do not trace, because it branches on row lengths."""
    return paged_attention(q, k, v, keys, values, PagedRows(slots, starts, lengths, tables), window or None)


@_opaque.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


def _attend(q_THD: Tensor, keys_NPGD: Tensor, values_NPGD: Tensor, prompt: _Prompt, window: int | None) -> Tensor:
    q = q_THD[prompt.begin : prompt.end].transpose(0, 1)[None]
    k, v = (
        held.index_select(0, prompt.pages_W).flatten(0, 1)[: prompt.whole].transpose(0, 1)[None]
        for held in (keys_NPGD, values_NPGD)
    )
    count, grouped = prompt.end - prompt.begin, q.shape[1] != k.shape[1]
    mask = None
    if count < prompt.whole or (window is not None and window < count):
        positions = torch.arange(prompt.whole, device=q.device)
        ago_SC = positions[prompt.whole - count :, None] - positions
        mask = ago_SC >= 0 if window is None else (ago_SC >= 0) & (ago_SC < window)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return mixed[0].transpose(0, 1)


def _prepare(rows: PagedRows, size: int) -> _Prepared:
    starts, lengths = rows.starts_E.tolist(), rows.lengths_R.tolist()
    by_pages: dict[int, list[int]] = {}
    prompts = []
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if end - begin == 1:
            # In a group, the longest row has less than twice the pages of the shortest.
            by_pages.setdefault((length // size + 1).bit_length(), []).append(row)
        elif end > begin:
            whole = length + end - begin
            prompts.append(_Prompt(begin, end, whole, rows.tables_RW[row, : -(-whole // size)].long()))
    singles = []
    for members in by_pages.values():
        width = max(lengths[row] for row in members) // size + 1
        ago_BC = rows.lengths_R[members][:, None] - torch.arange(width * size)
        tokens_B = torch.tensor([starts[row] for row in members])
        pages_X = rows.tables_RW[members, :width].flatten().long()
        empty_E = (ago_BC < 0).flatten().nonzero()[:, 0]
        # A group of one row reads only the row's own positions.
        places = lengths[members[0]] + 1 if len(members) == 1 else width * size
        singles.append(_Singles(tokens_B, pages_X, places, empty_E, ago_BC[:, :places], {}))
    real = (rows.slots_T >= 0).nonzero()[:, 0]
    return _Prepared(real, rows.slots_T[real].long(), singles, prompts)
