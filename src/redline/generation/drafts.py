"""Speculative decoding by prompt lookup: the tokens that followed the same last words earlier in the text.

The engine computes drafts together with the last token, and keeps those that it would have sampled itself. Since the
noise of a token depends on the seed and the position only, a text is the same with and without drafts.
"""

from redline.generation.sampler import has_penalties
from redline.generation.sequence import Sequence

# The number of last tokens that are looked up; longer matches are preferred.
_LENGTHS = (4, 3, 2)


class PromptLookup:
    """Proposes up to `most` tokens. Keeps an index of each text, to which new tokens are added."""

    def __init__(self, most: int) -> None:
        self.most = most
        # For each text: the number of indexed tokens, and where the tokens after each short sequence begin.
        self._indexed: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    @staticmethod
    def suits(sequence: Sequence) -> bool:
        """Returns whether tokens may be verified together, which penalties and grammars prevent."""
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
        """Forgets a text that has ended."""
        self._indexed.pop(sequence, None)
