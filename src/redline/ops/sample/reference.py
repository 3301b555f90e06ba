"""Reference implementation of `sample`: noise is a hash of a key, a position and the token id.

N: rows, V: vocabulary.
"""

import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF


def sample(logits_NV: Tensor, temperature_N: Tensor, keys_N: Tensor, drawn_N: Tensor) -> Tensor:
    """Computes `sample` in fp32.

    The token with the largest sum of logit / temperature and Gumbel noise is a sample of the softmax distribution.
    """
    draws_N1 = (temperature_N > 0)[:, None]
    logits_NV = logits_NV.float()
    chosen_NV = logits_NV
    if draws_N1.any():
        drawn_NV = logits_NV / torch.where(draws_N1, temperature_N[:, None], 1.0)
        drawn_NV = drawn_NV + noise(keys_N, drawn_N, logits_NV.shape[1])
        chosen_NV = torch.where(draws_N1, drawn_NV, logits_NV)
    tokens_N = chosen_NV.argmax(dim=-1)
    # argmax treats NaN as the largest value, so checking the chosen logit is enough.
    largest_N = chosen_NV.gather(1, tokens_N[:, None])[:, 0]
    return tokens_N.masked_fill(~largest_N.isfinite(), -1)


def noise(keys_N: Tensor, drawn_N: Tensor, vocabulary: int) -> Tensor:
    """Returns Gumbel noise (N, V) for each token of the vocabulary, after `drawn_N` earlier tokens."""
    place_N1 = mixed(keys_N + mixed(drawn_N))[:, None]
    bits = mixed(place_N1 + mixed(torch.arange(vocabulary, device=keys_N.device)))
    # Adding 0.5 keeps the value away from 0 and 1 in fp32, so that both logarithms are finite.
    uniform = ((bits >> 9).float() + 0.5) / 2**23
    return -(-uniform.log()).log()


def mixed(number: Tensor) -> Tensor:
    """Hashes 32-bit numbers (the finalizer of MurmurHash3) in int64, which gives the same result on every device."""
    number = number & _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)
