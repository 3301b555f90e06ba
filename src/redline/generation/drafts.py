"""Proposes drafts for speculative decoding by prompt lookup.

Looks for an earlier place in the text with the same tokens as the end of the text, and proposes the tokens that follow
that place. The engine computes these drafts together with the last token, and keeps those that it samples itself. The
noise that samples a token depends only on the seed, the position and the token id, so drafts do not change the text.
"""

from redline.generation.sampler import has_penalties
from redline.generation.sequence import Sequence

# The numbers of last tokens that are looked up, in the order of preference.
_LENGTHS = (4, 3, 2)


class PromptLookup:
    """Proposes up to `most` tokens for a text. Keeps an index of each text, which each call extends."""

    def __init__(self, most: int) -> None:
        self.most = most
        # For each text: the number of indexed tokens, and the position after the last place of each run of tokens.
        self._indexed: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    @staticmethod
    def suits(sequence: Sequence) -> bool:
        """Returns whether drafts may be verified together. Penalties, grammars and `min_tokens` prevent it."""
        request = sequence.request
        return request.grammar is None and not request.min_tokens and not has_penalties(request.sampling)

    def __call__(self, sequence: Sequence) -> list[int]:
        if not self.suits(sequence):
            return []
        tokens = sequence.tokens
        done, index = self._indexed.get(sequence, (0, {}))
        # The last tokens of the text are looked up before they are indexed, because nothing follows them yet.
        for end in range(max(done, _LENGTHS[-1]), len(tokens)):
            for length in _LENGTHS:
                if length <= end:
                    index[tuple(tokens[end - length : end])] = end
        self._indexed[sequence] = (len(tokens), index)
        for length in _LENGTHS:
            begin = index.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if begin is not None:
                return tokens[begin : begin + self.most]
        return []

    def drop(self, sequence: Sequence) -> None:
        """Deletes the index of a text that has ended."""
        self._indexed.pop(sequence, None)
