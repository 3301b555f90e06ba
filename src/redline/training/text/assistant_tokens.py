"""Finds the tokens that the assistant wrote, so that the loss counts only those."""

from collections.abc import Sequence

import numpy as np


def assistant_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns for each token whether any of its characters lies in a span.

    `offsets` are the ranges of characters of the tokens, in ascending order, as a tokenizer returns them; `spans` are
    the ranges of the assistant's answers. A token that spans the begin of an answer belongs to it.

    >>> assistant_tokens([(0, 4), (4, 6), (6, 9)], [(5, 9)]).tolist()
    [False, True, True]
    """
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    chosen = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        chosen[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")] = True
    return chosen
