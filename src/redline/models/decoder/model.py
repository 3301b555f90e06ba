"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, gated MLPs.

Blocks return the residual stream and their last branch separately, so that the next norm adds them in one kernel.
`forward` and `loss` are for training and scoring; `new_pages` and `flat` are for generation, `new_cache` and
`prefill` for evaluation.

B: batch, S: tokens, W: width, V: vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.decoder.config import DecoderConfig
from redline.models.decoder.key_value_cache import KeyValueCache
from redline.models.decoder.paged_cache import FlatCall, PagePool
from redline.nn.attention import GroupedQueryAttention, Past
from redline.nn.head import Head
from redline.nn.packing import Packing
from redline.nn.rms_norm import RMSNorm
from redline.nn.rope import RotaryTables
from redline.nn.swiglu import SwiGLU


class Decoder(nn.Module):
    """Maps tokens (B, S) to logits (B, S, V) for the next token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.tables = RotaryTables(config.context, config.head_dim, config.rope_base, config.rope_scaling)
        self.blocks = nn.ModuleList(Block(config, window) for window in config.windows)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(config.width, config.vocabulary)
        self.tie()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # The last layer of each residual branch starts small, so that the stream does not grow with the depth.
                branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if branch else 0.02)

    def tie(self) -> None:
        """Ties embedding and head if the config says so; call it again after moving off the meta device."""
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int:
        return self.config.context

    def forward(self, tokens_BS: Tensor, documents: Tensor | Packing | None = None) -> Tensor:
        return self.head(self.hidden(tokens_BS, documents))

    def hidden(self, tokens_BS: Tensor, documents: Tensor | Packing | None = None) -> Tensor:
        """Returns the normalized states (B, S, W) that the head reads; `documents` numbers each token's document."""
        self._check(tokens_BS)
        packing = Packing.of(documents) if isinstance(documents, Tensor) else documents
        if packing is not None and packing.documents_BS.shape != tokens_BS.shape:
            raise ModelError(
                f"documents have the shape {tuple(packing.documents_BS.shape)}, but the tokens "
                f"{tuple(tokens_BS.shape)}."
            )
        positions_BS = None if packing is None else packing.positions_BS
        return self._run(tokens_BS, positions_BS, packing, None)

    def loss(
        self, tokens_BS: Tensor, targets_BS: Tensor, documents: Tensor | Packing | None = None, **options: Any
    ) -> Tensor:
        """Returns the cross-entropy of the targets, with the options of `Head.loss`.

        The fused kernel never materializes all logits.
        """
        return self.head.loss(self.hidden(tokens_BS, documents), targets_BS, **options)

    def new_cache(self, batch: int, length: int) -> KeyValueCache:
        weight = self.norm.weight
        return KeyValueCache.make(self.config, batch, length, weight.dtype, weight.device)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: KeyValueCache) -> Tensor:
        """Processes the first `counts_B` tokens of each row; returns the logits (B, V) after each row's last token."""
        self._check(tokens_BS)
        length = tokens_BS.shape[1]
        pasts = cache.chunk_pasts(counts_B, length)
        positions_BS = cache.lengths_B[:, None] + torch.arange(length, device=tokens_BS.device)
        # Clamped, because the positions of padding may exceed the context; the outputs of padding are not used.
        x_BSW = self._run(tokens_BS, positions_BS.clamp_(max=self.config.context - 1), None, pasts)
        cache.lengths_B.add_(counts_B)
        last_BW = x_BSW[torch.arange(len(x_BSW), device=x_BSW.device), (counts_B - 1).clamp(min=0)]
        return self.head(last_BW)

    def new_pages(self, count: int, size: int) -> PagePool:
        """Returns a paged cache of `count` pages with room for `size` tokens each."""
        weight = self.norm.weight
        return PagePool.make(self.config, count, size, weight.dtype, weight.device)

    def flat(self, tokens_T: Tensor, call: FlatCall) -> Tensor:
        """Processes the new tokens of many rows, one row after the other; returns the logits at `call.sampled_M`.

        The tokens may be single ones, chunks of prompts, or a mix; the keys and values are in pages.
        """
        pasts = [call.pool.past(layer, call.rows, window) for layer, window in enumerate(self.config.windows)]
        x_BSW = self._run(tokens_T[None], call.positions_T[None], None, pasts)
        return self.head(x_BSW[0, call.sampled_M])

    def _run(
        self, tokens_BS: Tensor, positions_BS: Tensor | None, packing: Packing | None, pasts: Sequence[Past] | None
    ) -> Tensor:
        branch, residual = self.embedding(tokens_BS), None
        for index, block in enumerate(self.blocks):
            past = None if pasts is None else pasts[index]
            branch, residual = block(branch, residual, self.tables, positions_BS, packing, past)
        return self.norm.add(branch, residual)[0]

    def _check(self, tokens_BS: Tensor) -> None:
        if tokens_BS.ndim != 2 or tokens_BS.is_floating_point():
            raise ModelError(
                f"a decoder takes integers of shape (batch, tokens), not {tokens_BS.dtype} of shape "
                f"{tuple(tokens_BS.shape)}."
            )
        if not 0 < tokens_BS.shape[1] <= self.config.context:
            raise ModelError(f"the model takes 1 to {self.config.context} tokens, not {tokens_BS.shape[1]}.")


class Block(nn.Module):
    """Attention and an MLP, each with pre-norm and a residual connection."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = GroupedQueryAttention(
            config.width,
            config.heads,
            config.key_value_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            norm_eps=config.norm_eps if config.query_key_norm else None,
            window=window,
        )
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(
        self,
        branch_BSW: Tensor,
        residual_BSW: Tensor | None,
        tables: RotaryTables,
        positions_BS: Tensor | None = None,
        packing: Packing | None = None,
        past: Past | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.attention_norm.add(branch_BSW, residual_BSW)
        branch = self.attention(normed, tables, positions_BS, packing, past)
        normed, residual = self.mlp_norm.add(branch, residual)
        return self.mlp(normed), residual
