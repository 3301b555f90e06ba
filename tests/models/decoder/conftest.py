"""Tiny random models by transformers, the oracle, saved as it saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Each shows something that no other does; sizes are odd, so that no two are confused.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama-bias": ("Llama", {"attention_bias": True, "num_key_value_heads": 6, "head_dim": 10}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 14, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
}


def make(variant: str, **others: Any) -> Any:
    import transformers

    family, own = VARIANTS[variant]
    sizes = {
        "vocab_size": 89,
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | own | others)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from their start, so that a bias, a norm or an angle that is left out shows.
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim == 2 else 0.4))
            if "norm" in name:
                parameter.add_(1)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """A folder as `save_pretrained` writes it, and the model itself."""

    def save(variant: str, shard: str = "5GB", **others: Any) -> tuple[Path, Any]:
        model = make(variant, **others)
        folder = tmp_path / variant
        model.save_pretrained(folder, max_shard_size=shard)
        return folder, model

    return save
