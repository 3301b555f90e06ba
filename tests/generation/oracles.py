"""Tiny random models of transformers, as folders that redline loads, and what transformers says of generated texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY, CONTEXT = 101, 120
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
_WINDOW = {"Mistral": {"sliding_window": 8}}
FAMILIES = ("Llama", "Qwen3", "Mistral")


def make_oracle(family: str, folder: Path) -> Any:
    """Saves a model of the family, and returns it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**_SIZES, **_HEADS, **_WINDOW.get(family, {}), eos_token_id=None)
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    oracle.save_pretrained(folder)
    return oracle


@torch.no_grad()
def greedy_mistakes(oracle: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[str]:
    """Returns where an output is not the greedy text after its prompt, by one call for all texts.

    Each token must be the most likely one after all tokens before it, so this is the text that `generate` gives.
    """
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mistakes = []
    for begin in range(0, len(texts), 256):
        best = oracle(tokens[begin : begin + 256]).logits.argmax(-1).tolist()
        for row, chosen in enumerate(best, begin):
            for place, token in enumerate(outputs[row], len(prompts[row])):
                if chosen[place - 1] != token:
                    mistakes.append(f"text {row}: token {place} is {token}, not {chosen[place - 1]}")
                    break
    return mistakes
