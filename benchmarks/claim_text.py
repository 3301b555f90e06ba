"""The text that claims_cpu.py and claims_gpu.py train small decoders on: the help topics of Python, as bytes.

Every installation of Python contains them (about 0.7 MB). The last tenth is held out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from redline.models.decoder import Decoder, DecoderConfig

VOCABULARY = 256


def read_text() -> tuple[Tensor, Tensor]:
    """Returns the tokens for training and the held-out tokens."""
    # Imported here, because some systems package it apart from Python.
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    held_out = len(tokens) // 10
    return tokens[:-held_out], tokens[-held_out:]


def draw(tokens_T: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random rows of tokens and their targets."""
    begins = torch.randint(len(tokens_T) - length, (rows, 1), generator=generator).to(tokens_T.device)
    rows_BS = tokens_T[begins + torch.arange(length + 1, device=tokens_T.device)]
    return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()


def decoder(width: int, layers: int, length: int, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    heads = max(1, width // 64)
    return Decoder(DecoderConfig(VOCABULARY, width, layers, heads, mlp_width=3 * width, context=length))


def held_out_loss(predict: Callable[[Tensor], Tensor], tokens_T: Tensor, length: int, rows: int = 32) -> float:
    """Returns the mean cross-entropy of a fixed set of held-out rows, in nats per byte."""
    inputs, targets = draw(tokens_T, rows, length, torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = predict(inputs).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
