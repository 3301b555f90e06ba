"""Chooses which tokens of which requests the next step computes. Plain Python without torch.

A sequence has `total` tokens, of which `computed` have been computed. Each step distributes a budget of tokens over the
sequences that have uncomputed tokens. This one rule covers decoding (one token is uncomputed), chunks of long prompts,
prefixes found in the cache (which count as computed), and preemption (which sets `computed` to 0).

Sequences that decode come first, then prompts in order of arrival. While any sequence decodes, the prompt tokens of a
step are limited by their cost, so that a long prompt does not delay the next tokens of the others. If the cache is
full, the sequence with the fewest computed tokens loses its blocks and is computed again later. The oldest sequence is
never preempted, so at least one sequence always makes progress.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from redline.errors import RedlineError
from redline.generation.blocks import Blocks
from redline.generation.request import EngineStats, Finish
from redline.generation.sequence import Sequence
from redline.generation.step_plan import PlannedRow, StepPlan

# A prompt token at position p costs as much as 1 + p / _CONTEXT_COST tokens at position 0. In a model of 1.2B
# parameters, a token takes 1.95 GFLOP for the weights, and 0.13 MFLOP of attention for each earlier token.
_CONTEXT_COST = 15_000
_LEAST_CHUNK = 128
# The share of all blocks that must stay free when a sequence is admitted while others run, because the running
# sequences will need more blocks.
_RESERVE = 0.01

Draft = Callable[[Sequence], list[int]]


@dataclass(frozen=True)
class Limits:
    """The limits of a step: up to `token_budget` tokens in up to `max_rows` rows, with up to `chunk` tokens of a row.

    In a step with at least one row that decodes, `prompt_cost` limits the sum of the costs of all prompt tokens. A
    token at position 0 costs 1, and tokens at later positions cost more (see `_CONTEXT_COST`). If possible, the number
    of tokens between the first `lead` tokens of a sequence and the end of a chunk is divisible by `multiple`.
    """

    max_rows: int
    token_budget: int
    chunk: int
    prompt_cost: int
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("max_rows", "chunk", "prompt_cost"):
            if getattr(self, name) < 1:
                raise RedlineError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.token_budget < self.max_rows:
            raise RedlineError(
                f"token_budget must be at least max_rows ({self.max_rows}), not {self.token_budget}: every row that "
                "decodes takes one token of it."
            )


class Scheduler:
    """Plans steps, and adds the sampled tokens to sequences. `draft` proposes tokens that may follow a sequence."""

    def __init__(self, blocks: Blocks, limits: Limits, draft: Draft | None = None) -> None:
        self.blocks, self.limits = blocks, limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._draft = draft
        # A heap of the free rows. The lowest row is used first, so that rows that are never needed take no memory.
        self._rows = list(range(limits.max_rows))
        self._sequences: dict[str, Sequence] = {}
        self.counted = dict.fromkeys(
            ("prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "recomputed_tokens"), 0
        ) | {"drafted_tokens": 0, "accepted_tokens": 0}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> Sequence:
        return self._sequences[request_id]

    def stats(self) -> EngineStats:
        blocks = {"blocks": self.blocks.count, "blocks_used": self.blocks.used}
        return EngineStats(running=len(self.running), waiting=len(self.waiting), **blocks, **self.counted)

    def add(self, sequence: Sequence) -> None:
        if sequence.request.id in self._sequences:
            raise RedlineError(f"there is already a request with the id {sequence.request.id!r}: use a unique id.")
        self.check_fits(len(sequence.request.prompt) + sequence.limit)
        self._sequences[sequence.request.id] = sequence
        insort(self.waiting, sequence, key=lambda one: one.arrival)

    def check_fits(self, tokens: int) -> None:
        """Raises RedlineError if a text of this many tokens needs more blocks than the cache has."""
        if self.blocks.needed(tokens) > self.blocks.count:
            raise RedlineError(
                f"the request may grow to {tokens} tokens, and the key-value cache has room for "
                f"{self.blocks.count * self.blocks.size}: ask for fewer tokens."
            )

    def abort(self, request_id: str, reason: Finish = Finish.ABORTED) -> None:
        """Ends a sequence and releases its blocks.

        A launched step may still write to these blocks. Yet they can be reused at once, because steps run in order, and
        the next sequence that gets them writes in a later step.
        """
        sequence = self._sequences[request_id]
        self._end(sequence, reason)

    def plan(self) -> StepPlan:
        """Returns the next step, and counts its tokens as computed. An empty plan means that nothing can run now."""
        planned: dict[Sequence, PlannedRow] = {}
        ready = sorted((one for one in self.running if not one.is_blocked), key=lambda one: (one.rest > 1, one.arrival))
        budget, cost = self.limits.token_budget, float(self.limits.prompt_cost)
        decodes = any(one.rest == 1 for one in ready)
        for sequence in ready:
            if sequence.row < 0:
                continue  # it was preempted for a sequence that was planned before it
            count = self._count(sequence, budget, cost if decodes else None)
            if count < 1:
                continue
            before = len(planned)
            reserved = self._reserve(sequence, count, planned)
            if len(planned) < before:
                budget = self.limits.token_budget - sum(row.count for row in planned.values())
            if reserved:
                planned[sequence] = row = self._planned(sequence, count, budget - len(ready))
                budget -= row.count
                cost -= _cost(sequence.computed, count) if sequence.rest > 1 else 0
        plan = StepPlan([self._commit(row) for row in planned.values()])
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            plan.admitted.append(sequence)
            count = self._count(sequence, budget, cost if decodes else None)
            if count < 1:
                break
            self._reserve(sequence, count, {})
            cost -= _cost(sequence.computed, count)
            budget -= count
            plan.rows.append(self._commit(self._planned(sequence, count, 0)))
        plan.rows.sort(key=lambda row: row.count > 1)
        return plan

    def settle(self, row: PlannedRow, tokens: list[int]) -> list[int]:
        """Adds the tokens that a step sampled for a row to its sequence, and returns those that were added.

        Sets `finish` of the sequence if it ended.
        """
        sequence = row.sequence
        if sequence.finish is not None or not row.samples:
            return []
        sequence.pending -= 1
        accepted = 0
        while accepted < len(row.drafts) and tokens[accepted] == row.drafts[accepted]:
            accepted += 1
        if row.drafts and sequence.row >= 0:
            # The keys and values of drafts that were not accepted are overwritten by the next step.
            sequence.computed = row.start + 1 + accepted
        self.counted["accepted_tokens"] += accepted
        gained: list[int] = []
        for token in tokens[: accepted + 1]:
            if token in sequence.stop_tokens:
                self._end(sequence, Finish.STOP)
                break
            sequence.tokens.append(token)
            gained.append(token)
            if len(sequence.tokens) - len(sequence.request.prompt) >= sequence.limit:
                self._end(sequence, sequence.limit_reason)
                break
        self.counted["generated_tokens"] += len(gained)
        return gained

    def _count(self, sequence: Sequence, budget: int, cost: float | None) -> int:
        """Returns how many of the missing tokens the sequence may compute in this step."""
        count = min(sequence.rest, budget, self.limits.chunk)
        if cost is not None and sequence.rest > 1:
            # The first prompt of a step gets up to `_LEAST_CHUNK` tokens at any cost, so that it always progresses.
            least = _LEAST_CHUNK if cost == self.limits.prompt_cost else 0
            count = min(count, max(least, int(cost / _cost(sequence.computed, 1))))
        beyond = (sequence.computed + count - sequence.lead) % self.limits.multiple
        border = sequence.computed + count - beyond
        return border - sequence.computed if sequence.computed < border and count < sequence.rest else count

    def _reserve(self, sequence: Sequence, count: int, planned: dict[Sequence, PlannedRow]) -> bool:
        """Takes blocks for the next `count` tokens of a sequence, and preempts sequences if too few blocks are left.

        Returns False if the sequence was preempted itself.
        """
        missing = self.blocks.needed(sequence.computed + count) - len(sequence.blocks)
        while self.blocks.available < missing:
            # `running` is in order of arrival, and its first sequence is never preempted.
            victim = min(self.running[1:], key=lambda one: (one.computed, -one.arrival))
            planned.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self.blocks.take() for _ in range(missing))
        return True

    def _planned(self, sequence: Sequence, count: int, budget: int) -> PlannedRow:
        """Returns the planned row, with drafts if there is room for them."""
        drafts: list[int] = []
        if self._draft is not None and sequence.rest == 1 and not sequence.pending:
            room = min(budget, sequence.limit - sequence.generated - 1, self.limits.chunk - 1)
            # Drafts use only blocks that are available: no sequence is preempted for them.
            slots = (len(sequence.blocks) + self.blocks.available) * self.blocks.size - sequence.computed - 1
            drafts = self._draft(sequence)[: max(0, min(room, slots))]
            missing = self.blocks.needed(sequence.computed + 1 + len(drafts)) - len(sequence.blocks)
            sequence.blocks.extend(self.blocks.take() for _ in range(missing))
            self.counted["drafted_tokens"] += len(drafts)
        samples = 1 + len(drafts) if count == sequence.rest else 0
        start, generated = sequence.computed, sequence.generated
        return PlannedRow(sequence, sequence.row, start, count + len(drafts), samples, generated, tuple(drafts))

    def _commit(self, row: PlannedRow) -> PlannedRow:
        """Counts the tokens of a row as computed, and names the blocks that they fill.

        Named blocks can be shared at once, even by rows of the same step, because a step writes the keys and values of
        all its rows before it reads any.
        """
        sequence = row.sequence
        sequence.computed += row.count
        sequence.pending += row.samples > 0
        known = min(sequence.computed - len(row.drafts), len(sequence.tokens))
        if known // self.blocks.size > sequence.named:
            names = sequence.block_names(known, self.blocks.size)
            for index in range(sequence.named, len(names)):
                self.blocks.name(sequence.blocks[index], names[index])
            sequence.named = len(names)
        return row

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a row and the cached blocks of its prefix. Returns False if there is no room."""
        if not self._rows or sequence.pending:
            return False
        # The last token is never taken from the cache, because it must be computed for its logits.
        hits = []
        for name in sequence.block_names(len(sequence.tokens) - 1, self.blocks.size):
            block = self.blocks.find(name)
            if block is None:
                break
            hits.append(block)
        missing = self.blocks.needed(sequence.total) - len(hits)
        promised = sum(max(0, self.blocks.needed(one.total) - len(one.blocks)) for one in self.running)
        reserve = int(self.blocks.count * _RESERVE) if self.running else 0
        idle = sum(map(self.blocks.is_idle, hits))
        if self.blocks.available - idle < missing + promised + reserve:
            return False
        self.waiting.pop(0)
        insort(self.running, sequence, key=lambda one: one.arrival)
        for block in hits:
            self.blocks.share(block)
        sequence.row, sequence.blocks = heappop(self._rows), hits
        sequence.named, sequence.computed = len(hits), len(hits) * self.blocks.size
        if sequence.lost:
            self.counted["recomputed_tokens"] += max(0, sequence.lost - sequence.computed)
            sequence.lost = 0
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.cached = True, sequence.computed
            self.counted["cached_tokens"] += sequence.cached
            self.counted["prompt_tokens"] += len(sequence.request.prompt)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counted["preemptions"] += 1
        sequence.lost = sequence.computed
        self._release(sequence)
        sequence.computed = 0
        insort(self.waiting, sequence, key=lambda one: one.arrival)

    def _end(self, sequence: Sequence, reason: Finish) -> None:
        sequence.finish = reason
        del self._sequences[sequence.request.id]
        if sequence.row >= 0:
            if reason == Finish.ERROR:
                self.blocks.forget(sequence.blocks)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
        heappush(self._rows, sequence.row)
        sequence.row, sequence.blocks = -1, []


def _cost(position: int, count: int) -> float:
    return count * (1 + (position + count / 2) / _CONTEXT_COST)
