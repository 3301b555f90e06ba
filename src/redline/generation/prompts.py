"""Reads prompts of token ids, given as lists or tensors."""

from collections.abc import Sequence
from itertools import chain
from operator import index

from torch import Tensor

from redline.errors import RedlineError

Prompts = Sequence[Sequence[int] | Tensor] | Tensor


def read_prompts(prompts: Prompts, vocabulary: int) -> list[list[int]]:
    try:
        read = [list(map(index, one.tolist() if isinstance(one, Tensor) else one)) for one in prompts]
    except TypeError as error:
        raise RedlineError(
            "prompts must be lists or tensors of token ids, as in [[1, 2, 3], [4, 5]]; a single prompt is [[1, 2, 3]]."
        ) from error
    if not read or not all(read):
        raise RedlineError("a prompt needs at least one token.")
    for token in chain.from_iterable(read):
        if not 0 <= token < vocabulary:
            raise RedlineError(f"token {token} is not in the model's vocabulary of {vocabulary}.")
    return read
