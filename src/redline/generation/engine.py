"""Text out of a language model: prompts taken in by chunks, then one recorded step a token.

On a GPU the whole step (the model, the sampling, feeding the token back) is one CUDA graph, and the host only launches
it and reads tokens behind it. On a CPU the same code runs without the graph.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index
from typing import Any, cast

import torch
from torch import Tensor, nn

from redline.cuda_graphs import CudaGraphCapturer, GraphCapturer
from redline.errors import MachineError, ModelError, RedlineError
from redline.generation.language_model import LanguageModel, Remembering, Repeating
from redline.generation.planned import PlannedModel
from redline.generation.sampling import Sampling
from redline.generation.session import Session
from redline.generation.token_stream import Completion, Reason, TokenStream
from redline.ladder.plan import Plan

# A session, with its recorded step, serves all lengths up to a multiple of this.
_ROOM_MULTIPLE = 256
# Of a prompt that are taken in at a time, by each row and by all of them.
_CHUNK, _TOKENS_AT_A_TIME = 2048, 8192

Prompts = Sequence[Sequence[int] | Tensor] | Tensor


class InferenceEngine:
    """`InferenceEngine(model, plan="int8 + compile").generate([[1, 2, 3]])`.

    `model` is what `generation.language_model` describes. `plan` is one of the ladder's: its rungs are applied to a
    copy, or with `share=True` to the model itself, which saves the memory. `samples` are prompts for the rungs that
    look at real inputs. `graph` records the step; it is on where there is a GPU. `chunk` is how many tokens of a prompt
    are taken in at a time, 2,048 or on a GPU more for few rows. `vocabulary` is how many tokens the tokenizer knows:
    those that the model has beyond are never drawn. `recorder` is for tests.

    Without a plan the engine runs on the model's own weights; a model that is shared under a plan stays in evaluation
    mode, any other in the mode that it has.
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
            raise RedlineError(f"a prompt is taken in by chunks of 1 token or more, not {chunk}.")
        parsed = Plan.parse(plan or "") if plan is None or isinstance(plan, str) else plan
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        if graph and not cuda and recorder is None:
            raise MachineError(f"a CUDA graph needs a CUDA device, and the model is on {self.device.type}.")
        whole = cast(LanguageModel, model).vocabulary
        if vocabulary is not None and vocabulary < 1:
            raise RedlineError(f"a text is drawn from 1 token or more, not {vocabulary}.")
        self.vocabulary = whole if vocabulary is None else min(vocabulary, whole)
        read = read_prompts(samples, self.vocabulary) if len(samples) else []
        inputs = [torch.tensor([prompt], device=self.device) for prompt in read]
        self.model = PlannedModel.of(model, parsed, share, inputs)
        self._chunk = chunk
        self.records = cuda and graph is not False
        self.recorder = recorder
        self.setup_s = 0.0
        self._idle: tuple[Any, Session] | None = None

    @property
    def plan(self) -> Plan:
        """What is applied, with the choices that rungs made; graphs are the engine's own."""
        return self.model.plan

    def new_state(self, batch: int = 1) -> Any:
        """Nothing remembered yet, for `batch` texts; only a model with long-term memory has one."""
        return self._remembering().new_state(batch)

    def stream(
        self,
        prompts: Prompts,
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> TokenStream:
        """Tokens as they come. `setup_s` says how long making and recording the step took, 0 when it was there.

        With `state` the prompts go on from what it remembers, a row from a row, and the stream's `state` is what is
        remembered after it.
        """
        sampling, prompts = sampling or Sampling(), read_prompts(prompts, self.vocabulary)
        limit, reason = self._limit(prompts, max_tokens)
        if state is not None:
            self._remembering()
        room = self._room(max(map(len, prompts)) + limit)
        key = (len(prompts), room, sampling.form)
        session = self._session(key, len(prompts), room, sampling)

        def release() -> None:
            self._idle = (key, session)

        stops = frozenset(stop_tokens)
        chunk = self._chunk_of(len(prompts))
        return TokenStream(session, prompts, sampling, limit, reason, stops, chunk, release, state)

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> list[Completion]:
        """Whole texts; every row is what it would be alone with the seed `seed + row`, with one exception.

        All rows end where the longest prompt's context does: give prompts that nearly fill it a call of their own.
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

    def _session(self, key: Any, batch: int, room: int, sampling: Sampling) -> Session:
        """The one of the last stream when it fits and nobody uses it; its memory is given back when it does not."""
        idle, self._idle = self._idle, None
        if idle is not None and idle[0] == key and idle[1].is_sound():
            self.setup_s = 0.0
            return idle[1]
        del idle
        begun = time.perf_counter()
        recorder = self.recorder
        if recorder is None and self.records:
            # Each with memory of its own: that of a recording which is gone cannot be recorded into.
            recorder = CudaGraphCapturer(self.device)
        session = Session(self.model, batch, room, sampling, self.vocabulary, self.device, recorder)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.setup_s = time.perf_counter() - begun
        return session

    def _remembering(self) -> Remembering:
        if not isinstance(self.model.model, Remembering):
            raise ModelError("a state needs a model with neural memory; this model has none.")
        return self.model.model

    def _chunk_of(self, rows: int) -> int:
        if self._chunk is not None:
            return self._chunk
        # Few rows leave a GPU waiting for its host; pieces that are recorded do not.
        is_slow = self.device.type == "cuda" and not isinstance(self.model.model, Repeating)
        return max(_CHUNK, _TOKENS_AT_A_TIME // rows) if is_slow else _CHUNK

    def _room(self, length: int) -> int:
        if isinstance(self.model.model, Remembering):
            return 0  # what is remembered does not grow, so one session serves all lengths
        room = -(-length // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
        return room if self.model.context is None else min(room, self.model.context)

    def _limit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, Reason]:
        if max_tokens < 1:
            raise RedlineError(f"at least 1 token is generated, not {max_tokens}.")
        longest, context = max(map(len, prompts)), self.model.context
        if context is None or longest + max_tokens <= context:
            return max_tokens, "length"
        if longest >= context:
            raise RedlineError(f"the prompt has {longest} tokens, and the model's context is {context}.")
        return context - longest, "context"


def read_prompts(prompts: Prompts, vocabulary: int) -> list[list[int]]:
    try:
        read = [list(map(index, one.tolist() if isinstance(one, Tensor) else one)) for one in prompts]
    except TypeError as error:
        raise RedlineError(
            "prompts are lists or tensors of whole numbers, as in [[1, 2, 3], [4, 5]]: a single one is [[1, 2, 3]]."
        ) from error
    if not read or not all(read):
        raise RedlineError("a prompt needs at least one token.")
    for token in chain.from_iterable(read):
        if not 0 <= token < vocabulary:
            raise RedlineError(f"token {token} is not in the model's vocabulary of {vocabulary}.")
    return read
