"""The engine for one batch at a time: chunked prefill, then one decode step per token.

On a GPU, one CUDA graph runs the whole decode step (the model, the sampling, feeding the token back); the host only
launches it and reads finished tokens. On a CPU the same code runs without the graph.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from redline.errors import MachineError, ModelError, RedlineError
from redline.generation.language_model import LanguageModel, MemoryModel, PiecewiseModel
from redline.generation.planned import PlannedModel
from redline.generation.prompts import Prompts, read_prompts
from redline.generation.request import SamplingOptions
from redline.generation.static_batch.sampling import form_of
from redline.generation.static_batch.session import Session
from redline.generation.static_batch.token_stream import Batch, Reason, TokenStream
from redline.generation.token_stream import Completion
from redline.ladder.plan import Plan, read_plan
from redline.machine.cuda_graphs import CudaGraphCapturer, GraphCapturer

# Cache lengths are rounded up to a multiple of this, so that one captured decode step serves texts of many lengths.
_CAPACITY_MULTIPLE = 256
# The number of prompt tokens per row in one prefill call, and the smallest total over all rows if kernel launches limit
# the speed.
_CHUNK, _PREFILL_TOKENS = 2048, 8192


class StaticBatchEngine:
    """Generates tokens with a model, as in `StaticBatchEngine(model, plan="int8 + compile").generate([[1, 2, 3]])`.

    `model` implements an interface of `generation.language_model`. The rungs of `plan` are applied to a copy of the
    model, or, with `share=True`, to the model itself, which saves memory. `samples` are example prompts for rungs that
    need real inputs. `graph` sets whether the decode step is captured as a CUDA graph (default: on a GPU). `chunk` is
    the number of prompt tokens per row and prefill call (default: 2,048, or more for few rows on a GPU). `vocabulary`
    is the size of the tokenizer's vocabulary: token ids beyond it are never sampled. `recorder` is for tests.

    Without a plan, the engine shares the model's weights. With a plan and `share=True`, the model is left in evaluation
    mode; otherwise the model's mode does not change.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | None = None,
        *,
        share: bool = False,
        samples: Prompts = (),
        graph: bool | None = None,
        chunk: int | None = None,
        vocabulary: int | None = None,
        recorder: GraphCapturer | None = None,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise RedlineError(f"chunk must be at least 1 token, not {chunk}.")
        parsed = Plan() if plan is None else read_plan(plan)
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        if graph and not cuda and recorder is None:
            raise MachineError(f"a CUDA graph needs a CUDA device, and the model is on {self.device.type}.")
        whole = cast(LanguageModel, model).vocabulary
        if vocabulary is not None and vocabulary < 1:
            raise RedlineError(f"vocabulary must be at least 1 token, not {vocabulary}.")
        self.vocabulary = whole if vocabulary is None else min(vocabulary, whole)
        read = read_prompts(samples, self.vocabulary) if len(samples) else []
        inputs = [torch.tensor([prompt], device=self.device) for prompt in read]
        self.model = PlannedModel.of(model, parsed, share, inputs)
        self._chunk = chunk
        self.captures = cuda and graph is not False
        self.recorder = recorder
        self.setup_s = 0.0
        self._idle: tuple[Any, Session] | None = None

    @property
    def plan(self) -> Plan:
        """The applied plan with its rungs' choices, but without CUDA graphs: the engine captures the step itself."""
        return self.model.plan

    def new_state(self, batch: int = 1) -> Any:
        """Returns the empty memory state for `batch` texts. Raises if the model has no neural memory."""
        return self._memory_model().new_state(batch)

    def stream(
        self,
        prompts: Prompts,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> TokenStream:
        """Returns an iterator over tokens. Sets `setup_s`: the time to build and capture the step, 0 if it is reused.

        With `state`, prompt i continues row i of that state, and the `state` property of the returned stream is the
        state after the tokens generated so far.
        """
        sampling, prompts = sampling or SamplingOptions(), read_prompts(prompts, self.vocabulary)
        limit, reason = self._limit(prompts, max_tokens)
        if state is not None:
            self._memory_model()
        capacity = self._capacity(max(map(len, prompts)) + limit)
        key = (len(prompts), capacity, form_of(sampling))
        session = self._session(key, len(prompts), capacity, sampling)

        def release() -> None:
            self._idle = (key, session)

        request = Batch(prompts, sampling, limit, reason, frozenset(stop_tokens), self._chunk_of(len(prompts)))
        return TokenStream(session, request, release, state)

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> list[Completion]:
        """Returns complete texts.

        Each row gets the text that it would get alone with the seed `seed + row`, with one exception: all rows end
        when the row with the longest prompt fills the context. Generate prompts that nearly fill the context
        separately.
        """
        options: dict[str, Any] = {"max_tokens": max_tokens, "stop_tokens": stop_tokens, "state": state}
        with self.stream(prompts, sampling, **options) as stream:
            for _ in stream:
                pass
        if state is not None:
            after = stream.state
            for row, completion in enumerate(stream.completions):
                completion.state = after.rows([row])
        return stream.completions

    def _session(self, key: Any, batch: int, capacity: int, sampling: SamplingOptions) -> Session:
        """Returns the last session if it is idle, sound and has this key; otherwise deletes it and makes another."""
        idle, self._idle = self._idle, None
        if idle is not None and idle[0] == key and idle[1].is_sound():
            self.setup_s = 0.0
            return idle[1]
        del idle
        begun = time.perf_counter()
        recorder = self.recorder
        if recorder is None and self.captures:
            # A new capturer has a new memory pool: the pool of a deleted graph cannot be reused for another capture.
            recorder = CudaGraphCapturer(self.device)
        session = Session(self.model, batch, capacity, sampling, self.vocabulary, self.device, recorder)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.setup_s = time.perf_counter() - begun
        return session

    def _memory_model(self) -> MemoryModel:
        if not isinstance(self.model.model, MemoryModel):
            raise ModelError("a state needs a model with neural memory; this model has none.")
        return self.model.model

    def _chunk_of(self, rows: int) -> int:
        if self._chunk is not None:
            return self._chunk
        # With few rows, kernel launches limit the speed of a prefill that is not captured as a CUDA graph.
        launch_bound = self.device.type == "cuda" and not isinstance(self.model.model, PiecewiseModel)
        return max(_CHUNK, _PREFILL_TOKENS // rows) if launch_bound else _CHUNK

    def _capacity(self, length: int) -> int:
        if isinstance(self.model.model, MemoryModel):
            return 0  # the state does not grow, so one session serves all lengths
        capacity = -(-length // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
        return capacity if self.model.context is None else min(capacity, self.model.context)

    def _limit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, Reason]:
        if max_tokens < 1:
            raise RedlineError(f"max_tokens must be at least 1 token, not {max_tokens}.")
        longest, context = max(map(len, prompts)), self.model.context
        if context is None or longest + max_tokens <= context:
            return max_tokens, "length"
        if longest >= context:
            raise RedlineError(
                f"the prompt has {longest} tokens, and the model's context is {context}: shorten the prompt."
            )
        return context - longest, "context"
