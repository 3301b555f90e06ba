"""The progress of one request in the scheduler: which of its tokens are known, computed and still to come."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from redline.generation.blocks import block_name, root_name
from redline.generation.request import Finish, Request


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `tokens` are the known ones: the prompt, and what was generated and read.

    `pending` counts tokens that a launched step samples and that the host has not read. `computed` counts tokens whose
    keys and values are in the cache when all launched steps have run. A text that reaches `limit` generated tokens ends
    with `limit_reason`. With `waits`, a step needs the value of the last token on the host, for example for a grammar.
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
    # The number of blocks whose names the pool knows.
    named: int = 0
    # The number of prompt tokens that were in the cache when the request was first admitted.
    cached: int = 0
    was_admitted: bool = False
    # The number of computed tokens that a preemption lost.
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
        """The number of tokens that have been sampled, read or not."""
        return self.total - len(self.request.prompt)

    @property
    def output(self) -> Tokens[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def is_blocked(self) -> bool:
        """Returns whether no step can be planned before another launched step has been read."""
        return self.generated >= self.limit or (self.waits and self.pending > 0)

    def block_names(self, tokens: int, size: int) -> list[bytes]:
        """Returns the names of the full blocks among the first `tokens` known tokens. Each is computed once."""
        full = min(tokens, len(self.tokens)) // size
        for index in range(len(self.names), full):
            parent = self.names[-1] if self.names else self._root
            self.names.append(block_name(parent, self.tokens[index * size : (index + 1) * size]))
        return self.names[:full]
