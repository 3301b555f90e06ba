"""Finds the tokens that the assistant wrote, so that the loss counts only those."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

_BEGIN, _END = itemgetter(0), itemgetter(1)


def assistant_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns for each token whether any of its characters lies in a span.

    `offsets` are the ranges of characters of the tokens, in ascending order, as a tokenizer returns them; `spans` are
    the ranges of the assistant's answers. A token that lies partly before an answer counts as part of it.

    >>> assistant_tokens([(0, 4), (4, 6), (6, 9)], [(5, 9)]).tolist()
    [False, True, True]
    """
    chosen = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        chosen[bisect_right(offsets, begin, key=_END) : bisect_left(offsets, end, key=_BEGIN)] = True
    return chosen
