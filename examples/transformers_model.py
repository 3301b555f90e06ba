"""transformers models as workloads, built from a config, so that nothing is downloaded.

redline climb examples/transformers_model.py:llama
redline climb examples/transformers_model.py:bert --shapes batch=8,length=512,width=768,layers=12
"""

import torch
from transformers.models.bert import BertConfig, BertModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from redline import Gate, Workload


def llama(
    batch: int = 1,
    length: int = 128,
    width: int = 256,
    layers: int = 4,
    vocabulary: int = 4096,
    written_out: bool = False,
) -> Workload:
    """A Llama-style decoder over `length` tokens; returns the logits. `written_out` selects eager attention."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=length,
        use_cache=False,
    )
    config._attn_implementation = "eager" if written_out else "sdpa"
    return Workload(
        build=lambda: LlamaForCausalLM(config),
        inputs=lambda seed: {"input_ids": torch.randint(vocabulary, (batch, length))},
        # With random weights the top two logits are close, so the gates compare distributions, not the top token.
        gates=(Gate("relative_error", 0.03), Gate("kl_divergence", 0.001)),
        items=batch * length,
        unit="token",
    )


def bert(batch: int = 1, length: int = 128, width: int = 256, layers: int = 4, vocabulary: int = 4096) -> Workload:
    """A BERT-style encoder over `length` tokens; returns the hidden states and the pooled state."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=length,
    )
    return Workload(
        build=lambda: BertModel(config),
        inputs=lambda seed: {"input_ids": torch.randint(vocabulary, (batch, length))},
        items=batch * length,
        unit="token",
    )
