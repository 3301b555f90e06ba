"""The progress of one request in the scheduler: which of its tokens are known, computed and missing."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from redline.generation.blocks import block_name, root_name
from redline.generation.request import Finish, Request


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `tokens` are the tokens that the host knows: the prompt and the generated ones it read.

    `pending` counts tokens that launched steps sample and that the host has not read. `computed` counts tokens whose
    keys and values are in the cache when all launched steps have run. A text that reaches `limit` generated tokens ends
    with `limit_reason`. With `waits`, the host must read the last token before the next step is planned, for example
    because of a grammar. `lead` is the number of first tokens after which captured pieces of the prompt can start.
    """

    request: Request
    arrival: int
    limit: int
    limit_reason: Finish
    waits: bool = False
    lead: int = 0
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(init=False)
    pending: int = 0
    computed: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    # The number of this sequence's blocks that the pool knows by the hash of their content, so that others share them.
    named: int = 0
    # The number of prompt tokens that were in the cache when the request was first admitted.
    cached: int = 0
    was_admitted: bool = False
    # The number of computed tokens that the last preemption discarded.
    lost: int = 0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.stop_tokens |= self.request.stop_tokens
        self._root = root_name(self.request.salt, self.request.adapter or "")

    @property
    def total(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def rest(self) -> int:
        """The number of tokens that must be computed before the next token can be sampled."""
        return self.total - self.computed

    @property
    def generated(self) -> int:
        """The number of tokens that launched steps sample, whether the host has read them or not."""
        return self.total - len(self.request.prompt)

    @property
    def output(self) -> Tokens[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def is_blocked(self) -> bool:
        """Whether a launched step must be read before the next step of this sequence can be planned."""
        return self.generated >= self.limit or (self.waits and self.pending > 0)

    def block_names(self, tokens: int, size: int) -> list[bytes]:
        """Returns the names of the full blocks among the first `tokens` known tokens. Caches the names."""
        full = min(tokens, len(self.tokens)) // size
        for index in range(len(self.names), full):
            parent = self.names[-1] if self.names else self._root
            self.names.append(block_name(parent, self.tokens[index * size : (index + 1) * size]))
        return self.names[:full]
