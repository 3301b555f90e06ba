"""What a token sees of the tokens before its stretch."""

from typing import NamedTuple

from torch import Tensor


class Far(NamedTuple):
    """Other queries and keys of the same values, and what is added to the scores of each key.

    A token sees from `first` on what comes before its stretch. `first_T` never falls from one token to the next, and
    none is beyond where its stretch begins.
    """

    q_THD: Tensor
    k_TGD: Tensor
    bias_T: Tensor
    first_T: Tensor
