"""The inference engine: continuous batching of requests that come and go at any time.

`Engine.step` plans a step, launches it, reads the tokens of a launched step, and updates the requests with them. On a
GPU, it reads the tokens of the previous step, so that the device already runs the next one and does not wait.
"""

from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn

from redline.errors import MachineError, RedlineError
from redline.generation.blocks import Blocks
from redline.generation.decoder_runner import DecoderRunner
from redline.generation.drafts import PromptLookup
from redline.generation.embeddings import embed
from redline.generation.grammar import GrammarCompiler, Matcher
from redline.generation.planned import PlannedModel
from redline.generation.pool_size import choose_blocks
from redline.generation.prompt_logprobs import score
from redline.generation.prompts import Prompts, read_prompts
from redline.generation.readback import Readback, Result
from redline.generation.request import MOST_LOGPROBS, EngineStats, Finish, Output, Request, TokenLogprobs
from redline.generation.sampling import NO_TOKEN
from redline.generation.scheduler import Limits, Scheduler
from redline.generation.sequence import Sequence as Progress
from redline.generation.session_states import SessionStates
from redline.generation.state_runner import StateRunner
from redline.generation.step_plan import PlannedRow, StepPlan
from redline.ladder.plan import Plan, read_plan
from redline.machine.cuda_graphs import CudaGraphCapturer, GraphCapturer

NOT_FINITE = (
    "the model's logits are not finite: the weights are damaged, or the precision is too narrow (try bf16 or fp32)."
)
_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
_TOKEN_BUDGET = {"cuda": 8192, "cpu": 2048}
# The limit of prompt tokens in a step in which other rows decode. On an H200, a model of 1.2B parameters takes about
# 10 ms for them.
_PROMPT_COST = {"cuda": 2048, "cpu": 256}
# The number of launched steps that may be unread when `step` returns. With 1, the device does not wait for the host.
_BEHIND = {"cuda": 1}
_UNLIMITED = 1 << 62
_GRAMMAR_TIMEOUT_S = 5.0
_COMPILE_WAIT_S = 0.01


@dataclass
class _Compiling:
    """A request whose grammar is being compiled."""

    sequence: Progress
    future: Future[Matcher]
    until: float


class Engine:
    """Runs requests of a model that implements an interface of `generation.language_model`.

    The rungs of `plan` are applied to a copy of the model, or, with `share`, to the model itself. `samples` are example
    prompts for rungs that need real inputs. `vocabulary` is the size of the tokenizer's vocabulary: token ids beyond it
    are never sampled.

    The key-value cache has `blocks` blocks of `block_size` tokens. By default, it has enough blocks for `max_rows` rows
    of the model's whole context, but takes at most the share `memory_share` of the free memory. A step has up to
    `token_budget` tokens and `max_rows` rows, and computes up to `chunk` prompt tokens of a row. `prompt_cost` limits
    the prompt tokens of a step in which other rows decode.

    `tokenizer` (a `tokenizers.Tokenizer`) is needed for grammars. `drafts` is the number of tokens that prompt lookup
    proposes at a time. Sessions of models with neural memory are stored in `session_folder`. A session is deleted if it
    was not used for `session_age_s` seconds; the least recently used ones are also deleted while all sessions together
    exceed `session_bytes`. `graph` sets whether steps are captured as CUDA graphs (default: on a GPU).
    Tests set `behind` (see `_BEHIND`) and `recorder`, which captures graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | None = None,
        *,
        share: bool = False,
        samples: Prompts = (),
        vocabulary: int | None = None,
        blocks: int | None = None,
        block_size: int | None = None,
        token_budget: int | None = None,
        max_rows: int = 256,
        chunk: int | None = None,
        prompt_cost: int | None = None,
        memory_share: float | None = None,
        tokenizer: Any = None,
        drafts: int = 0,
        session_folder: str | Path | None = None,
        session_bytes: int = 10 << 30,
        session_age_s: float = 30 * 86400,
        graph: bool | None = None,
        behind: int | None = None,
        recorder: GraphCapturer | None = None,
    ) -> None:
        parsed = Plan() if plan is None else read_plan(plan)
        self.device = next(model.parameters()).device
        kind = self.device.type if self.device.type == "cuda" else "cpu"
        if graph and kind != "cuda" and recorder is None:
            raise MachineError(f"a CUDA graph needs a CUDA device, and the model is on {self.device.type}.")
        if vocabulary is not None and vocabulary < 1:
            raise RedlineError(f"vocabulary must be at least 1 token, not {vocabulary}.")
        if chunk is not None and chunk < 1:
            raise RedlineError(f"chunk must be at least 1 token, not {chunk}.")
        whole: int = getattr(model, "vocabulary")  # noqa: B009
        self.vocabulary = whole if vocabulary is None else min(vocabulary, whole)
        read = read_prompts(samples, self.vocabulary) if len(samples) else []
        self.model = PlannedModel.of(model, parsed, share, [torch.tensor([one], device=self.device) for one in read])
        if recorder is None and kind == "cuda" and graph is not False:
            recorder = CudaGraphCapturer(self.device)
        budget = max(token_budget or _TOKEN_BUDGET[kind], max_rows)
        self._behind = _BEHIND.get(kind, 0) if behind is None else behind
        self._lookup = PromptLookup(drafts) if drafts else None
        chunk = min(chunk or budget, budget)
        cost = prompt_cost or _PROMPT_COST[kind]
        begun = perf_counter()
        if self.model.is_paged:
            size = block_size or _BLOCK_SIZE[kind]
            count = blocks or choose_blocks(self.model, size, max_rows, budget, self.device, memory_share)
            pool, limits = Blocks(count, size), Limits(max_rows, budget, chunk, cost)
            context = min(self.model.context or _UNLIMITED, count * size)
            pages = self.model.new_pages(count, size)
            arguments = (self.model, pages, max_rows, context, self.vocabulary, self.device, recorder)
            self._runner: DecoderRunner | StateRunner = DecoderRunner(*arguments)
        else:
            # A state has a fixed size, so each row needs one block, whatever its length: the block size is unlimited.
            piece = self.model.piece(chunk)
            pool, limits = Blocks(max_rows, _UNLIMITED), Limits(max_rows, budget, piece or chunk, cost, piece or 1)
            self._runner = StateRunner(self.model, max_rows, self.vocabulary, self.device, recorder, piece)
        self._build_s = perf_counter() - begun
        self.scheduler = Scheduler(pool, limits, self._lookup)
        self._states = SessionStates(self.model, self._runner, session_folder, session_bytes, session_age_s)
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, self.vocabulary)
        self._compiling: dict[str, _Compiling] = {}
        self._matchers: dict[Progress, Matcher] = {}
        self._in_flight: deque[tuple[StepPlan, Readback]] = deque()
        self._ended: list[Output] = []
        self._arrivals = 0

    @property
    def plan(self) -> Plan:
        """The applied plan with the options that its rungs chose. It has no CUDA graphs: the engine captures steps."""
        return self.model.plan

    @property
    def cache_bytes(self) -> int:
        """The size of the key-value cache, or of the states of all rows."""
        return self._runner.pool.bytes

    @property
    def setup_s(self) -> float:
        """The seconds spent so far on allocating the cache and on capturing steps as CUDA graphs."""
        return self._build_s + self._runner.capture_s

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._in_flight or self._ended or self._compiling)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def check(self, request: Request) -> None:
        """Raises RedlineError if the request can never run."""
        (prompt,) = read_prompts([request.prompt], self.vocabulary)
        limit, _ = self._limit(len(prompt), request.max_tokens)
        self.scheduler.check_fits(len(prompt) + limit)
        if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
            raise RedlineError(f"logprobs must be from 0 to {MOST_LOGPROBS}, not {request.logprobs}.")
        if request.adapter is not None:
            raise RedlineError(f"unknown adapter {request.adapter!r}: this engine has no adapters.")
        if request.grammar is not None and self._grammars is None:
            raise RedlineError("structured output needs a tokenizer, and this engine has none.")

    def submit(self, request: Request, state: Any = None) -> None:
        """Adds a request. Raises RedlineError if it can never run.

        `state` is a memory state of a model with neural memory: the request continues it, and `take_state` returns the
        new state after the request has ended.
        """
        self.check(request)
        if request.id in self._compiling:
            raise RedlineError(f"there is already a request with the id {request.id!r}: use a unique id.")
        # Drops the last output of an aborted request with the same id, so that it is not taken for one of this request.
        self._ended = [output for output in self._ended if output.id != request.id]
        drafts = self._lookup is not None
        waits = drafts or request.grammar is not None or request.session is not None or state is not None
        sequence = Progress(request, self._arrivals, *self._limit(len(request.prompt), request.max_tokens), waits)
        self._arrivals += 1
        if request.grammar is None or self._grammars is None:
            self.scheduler.add(sequence)
        else:
            future = self._grammars.start(request.grammar, request.stop_tokens)
            self._compiling[request.id] = _Compiling(sequence, future, monotonic() + _GRAMMAR_TIMEOUT_S)
        try:
            self._states.open(sequence, state)
        except RedlineError:
            self._remove(request.id)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request; the next step returns its last output. Does nothing if there is no such request."""
        if request_id in self._compiling or request_id in self.scheduler:
            self._remove(request_id)
            self._ended.append(Output(request_id, [], finish=Finish.ABORTED))

    def step(self) -> list[Output]:
        """Launches one step, and returns the outputs of the step that was read, which may be an earlier one."""
        outputs, self._ended = self._ended, []
        outputs += self._compiled()
        plan = self.scheduler.plan()
        self._states.admit(plan.admitted)
        outputs += self._launch(plan)
        if len(self._in_flight) > (self._behind if plan.rows else 0):
            plan, readback = self._in_flight.popleft()
            outputs += self._settle(plan, readback.read())
        elif not plan.rows and self._compiling and not outputs:
            # No request can run before a grammar is compiled, so this waits instead of returning at once.
            wait([one.future for one in self._compiling.values()], _COMPILE_WAIT_S)
        return outputs

    def embed(self, prompts: Prompts, pooling: str = "mean") -> list[list[float]]:
        """Returns a vector of norm 1 per prompt: the mean of its hidden states, or with "last" the last token's."""
        return embed(self.model, read_prompts(prompts, self.vocabulary), pooling, self.device)

    def score(self, prompts: Prompts, top: int = 0) -> list[list[TokenLogprobs]]:
        """Returns, per prompt, the log-probability of every token but the first, and the `top` most likely tokens."""
        return score(self.model, read_prompts(prompts, self.vocabulary), top, self.device)

    def new_state(self, batch: int = 1) -> Any:
        """Returns the empty memory state for `batch` texts. Raises if the model has no neural memory."""
        return self._states.new_state(batch)

    def state(self, request_id: str) -> Any:
        """Returns a copy of the memory state after the tokens so far of a request that was submitted with a state."""
        return self._states.current(self.scheduler[request_id])

    def take_state(self, request_id: str) -> Any:
        """Returns the final memory state of an ended request that was submitted with a state, and forgets it."""
        return self._states.take(request_id)

    def delete_session(self, salt: str, session: str) -> bool:
        """Deletes the stored state of a session, and returns whether there was one."""
        return self._states.delete(salt, session)

    def warm_up(self) -> None:
        """Captures the most common steps as CUDA graphs now, so that no request waits for a capture."""
        if isinstance(self._runner, DecoderRunner):
            self._runner.warm_up(self.scheduler.limits.max_rows)

    def close(self) -> None:
        """Ends all requests and stops the threads that compile grammars."""
        for request_id in [
            *self._compiling,
            *(one.request.id for one in [*self.scheduler.running, *self.scheduler.waiting]),
        ]:
            self._remove(request_id)
        self._in_flight.clear()
        self._ended.clear()
        if self._grammars is not None:
            self._grammars.close()

    def _limit(self, prompt: int, max_tokens: int) -> tuple[int, Finish]:
        if max_tokens < 1:
            raise RedlineError(f"max_tokens must be at least 1 token, not {max_tokens}.")
        context = self.model.context
        if context is None or prompt + max_tokens <= context:
            return max_tokens, Finish.LENGTH
        if prompt >= context:
            raise RedlineError(
                f"the prompt has {prompt} tokens, and the model's context is {context}: shorten the prompt."
            )
        return context - prompt, Finish.CONTEXT

    def _compiled(self) -> list[Output]:
        """Moves requests whose grammars are compiled to the scheduler, and returns outputs for those that failed."""
        failed = []
        for request_id, one in list(self._compiling.items()):
            try:
                if one.future.done():
                    matcher = one.future.result()
                    one.sequence.stop_tokens |= matcher.stop_tokens
                    self._matchers[one.sequence] = matcher
                    self.scheduler.add(one.sequence)
                elif monotonic() > one.until:
                    raise RedlineError(
                        f"compiling the grammar takes longer than {_GRAMMAR_TIMEOUT_S:g} s: simplify it."
                    )
                else:
                    continue
            except RedlineError as error:
                self._states.close(one.sequence)
                failed.append(Output(request_id, [], finish=Finish.ERROR, error=str(error)))
            del self._compiling[request_id]
        return failed

    def _launch(self, plan: StepPlan) -> list[Output]:
        """Launches a step, and returns outputs for the requests that ended because their grammar failed."""
        masks: list[bytes | None] = []
        failed = []
        for row in plan.rows:
            matcher = self._matchers.get(row.sequence) if row.samples else None
            try:
                masks += [None if matcher is None else matcher.mask()] * row.samples
            except RedlineError as error:
                masks += [None] * row.samples
                failed.append(self._fail(row.sequence, str(error)))
        if plan.rows:
            self._in_flight.append((plan, self._runner.launch(plan, masks)))
        return failed

    def _settle(self, plan: StepPlan, result: Result) -> list[Output]:
        outputs, begin = [], 0
        for row in plan.rows:
            sequence, end = row.sequence, begin + row.samples
            if row.samples and sequence.finish is None:
                output = self._settle_row(row, result.tokens[begin:end])
                if sequence.request.logprobs is not None:
                    output = _with_logprobs(output, begin, result)
                if output.tokens or output.finish is not None:
                    outputs.append(output)
            begin = end
        return outputs

    def _settle_row(self, row: PlannedRow, tokens: list[int]) -> Output:
        sequence = row.sequence
        accepted = next((i for i, draft in enumerate(row.drafts) if tokens[i] != draft), len(row.drafts))
        if NO_TOKEN in tokens[: accepted + 1]:
            return self._fail(sequence, NOT_FINITE)
        gained, error = self.scheduler.settle(row, tokens), ""
        matcher = self._matchers.get(sequence)
        try:
            if matcher is not None and gained and sequence.finish is None and matcher.accept(gained[-1]):
                self.scheduler.abort(sequence.request.id, Finish.STOP)
            if sequence.finish is not None:
                self._states.finish(sequence, row.row)
        except RedlineError as failure:
            error = str(failure)
            if sequence.finish is None:
                self.scheduler.abort(sequence.request.id, Finish.ERROR)
        if sequence.finish is not None:
            self._forget(sequence)
        return Output(sequence.request.id, gained, None, sequence.finish, sequence.cached, error)

    def _fail(self, sequence: Progress, error: str) -> Output:
        self._states.close(sequence)
        self.scheduler.abort(sequence.request.id, Finish.ERROR)
        self._forget(sequence)
        return Output(sequence.request.id, [], finish=Finish.ERROR, cached_tokens=sequence.cached, error=error)

    def _remove(self, request_id: str) -> None:
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:
            compiling.future.cancel()
            self._states.close(compiling.sequence)
            return
        sequence = self.scheduler[request_id]
        self._states.close(sequence)
        self.scheduler.abort(request_id)
        self._forget(sequence)

    def _forget(self, sequence: Progress) -> None:
        self._matchers.pop(sequence, None)
        if self._lookup is not None:
            self._lookup.drop(sequence)


def _with_logprobs(output: Output, entry: int, result: Result) -> Output:
    """Returns the output with the log-probabilities of its tokens; its first token is entry `entry` of the step."""
    found = []
    for place, token in enumerate(output.tokens, entry):
        logprob, top = result.logprobs[place]
        found.append(TokenLogprobs(token, logprob, top))
    return Output(output.id, output.tokens, found, output.finish, output.cached_tokens, output.error)
