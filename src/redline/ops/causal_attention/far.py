"""The far keys of causal attention: keys before a query's span, scored with separate queries and keys.

T: tokens of all sequences, H: query heads, G: key and value heads, D: head dimension.
"""

from typing import NamedTuple

from torch import Tensor


class Far(NamedTuple):
    """Queries and keys that score the tokens before each query's span. The values are those of the near keys.

    Token t sees the far keys from `first_T[t]` to `lowest_T[t] - 1`. `bias_T` is added to the scores of each key.
    `first_T` must not decrease from one token to the next, and must not exceed `lowest_T`.
    """

    q_THD: Tensor
    k_TGD: Tensor
    bias_T: Tensor
    first_T: Tensor
