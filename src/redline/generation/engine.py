"""Text out of a language model: prompts taken in by chunks, then one recorded step a token.

On a GPU the whole step (the model, the sampling, feeding the token back) is one CUDA graph, and the host only launches
it and reads tokens behind it. On a CPU the same code runs without the graph.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from redline.errors import MachineError, RedlineError
from redline.generation.language_model import LanguageModel
from redline.generation.planned import PlannedModel
from redline.generation.sampling import Sampling
from redline.generation.session import Session
from redline.generation.token_stream import Completion, Reason, TokenStream
from redline.graphed import CudaRecorder, Recorder
from redline.plan import Plan

# A session, with its recorded step, serves all lengths up to a multiple of this.
_ROOM_MULTIPLE = 256


class InferenceEngine:
    """`InferenceEngine(model, plan="int8 + compile").generate([[1, 2, 3]])`.

    `model` is what `generation.language_model` describes. `plan` is one of the ladder's: its rungs are applied to a
    copy, or with `share=True` to the model itself, which saves the memory. `samples` are prompts for the rungs that
    look at real inputs. `graph` records the step; it is on where there is a GPU. `chunk` is how many tokens of a prompt
    are taken in at a time. `recorder` is for tests.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | None = None,
        *,
        share: bool = False,
        samples: Sequence[Sequence[int] | Tensor] = (),
        graph: bool | None = None,
        chunk: int = 2048,
        recorder: Recorder | None = None,
    ) -> None:
        if chunk < 1:
            raise RedlineError(f"a prompt is taken in by chunks of 1 token or more, not {chunk}.")
        parsed = Plan.parse(plan or "") if plan is None or isinstance(plan, str) else plan
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        if graph and not cuda and recorder is None:
            raise MachineError(f"a CUDA graph needs a CUDA device, and the model is on {self.device.type}.")
        batches = [list(map(int, sample)) for sample in samples]
        if batches:
            check_prompts(batches, cast(LanguageModel, model).vocabulary)
        inputs = [torch.tensor([batch], device=self.device) for batch in batches]
        self.model = PlannedModel.of(model, parsed, share, inputs)
        self.chunk = chunk
        self.records = cuda and graph is not False
        self.recorder = recorder
        self.setup_s = 0.0
        self._idle: tuple[Any, Session] | None = None

    @property
    def plan(self) -> Plan:
        """What is applied, with the choices that rungs made; graphs are the engine's own."""
        return self.model.plan

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
    ) -> TokenStream:
        """Tokens as they come. `setup_s` says how long making and recording the step took, 0 when it was there."""
        sampling = sampling or Sampling()
        limit, reason = self._limit(prompts, max_tokens)
        longest = max(map(len, prompts))
        room = -(-(longest + limit) // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
        if self.model.context is not None:
            room = min(room, self.model.context)
        key = (len(prompts), room, sampling.form)
        session = self._session(key, len(prompts), room, sampling)

        def release() -> None:
            self._idle = (key, session)

        stops = frozenset(stop_tokens)
        return TokenStream(session, prompts, sampling, limit, reason, stops, self.chunk, release)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
    ) -> list[Completion]:
        """Whole texts; every row is what it would be alone with the seed `seed + row`, with one exception.

        All rows end where the longest prompt's context does: give prompts that nearly fill it a call of their own.
        """
        with self.stream(prompts, sampling, max_tokens=max_tokens, stop_tokens=stop_tokens) as stream:
            for _ in stream:
                pass
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
            recorder = CudaRecorder(self.device)
        session = Session(self.model, self.model.step, batch, room, sampling, self.device, recorder)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.setup_s = time.perf_counter() - begun
        return session

    def _limit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, Reason]:
        check_prompts(prompts, self.model.vocabulary)
        if max_tokens < 1:
            raise RedlineError(f"at least 1 token is generated, not {max_tokens}.")
        longest, context = max(map(len, prompts)), self.model.context
        if context is None or longest + max_tokens <= context:
            return max_tokens, "length"
        if longest >= context:
            raise RedlineError(f"the prompt has {longest} tokens, and the model's context is {context}.")
        return context - longest, "context"


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    if not prompts or not all(prompts):
        raise RedlineError("a prompt needs at least one token.")
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < vocabulary:
            raise RedlineError(f"token {token} is not in the model's vocabulary of {vocabulary}.")
