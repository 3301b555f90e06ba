"""An engine for callers who have all prompts at once: returns whole texts, or a stream of tokens."""

from collections.abc import Iterable
from itertools import count
from typing import Any

from msgspec.structs import replace
from torch import nn

from redline.generation.engine import Engine
from redline.generation.planned import PlannedModel
from redline.generation.prompts import Prompts, read_prompts
from redline.generation.request import Request, SamplingOptions
from redline.generation.token_stream import Completion, Outputs, TokenStream
from redline.ladder.plan import Plan
from redline.machine.cuda_graphs import GraphCapturer

_SEEDS = 2**63
_MEMORY_SHARE = {"cuda": 0.5}


class InferenceEngine:
    """Generates tokens with a model, as in `InferenceEngine(model, plan="int8 + compile").generate([[1, 2, 3]])`.

    `model` implements an interface of `generation.language_model`. The rungs of `plan` are applied to a copy of the
    model, or, with `share=True`, to the model itself, which saves memory. `samples` are example prompts for rungs that
    need real inputs. `graph` sets whether decode steps are captured as CUDA graphs (default: on a GPU). `chunk` is the
    number of prompt tokens per row and step. `vocabulary` is the size of the tokenizer's vocabulary: token ids beyond
    it are never sampled. `recorder` is for tests. `options` are further options of `Engine`.

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
        **options: Any,
    ) -> None:
        # `prompt_cost` is unlimited, because no caller waits for single tokens while prompts are computed. The share of
        # memory is smaller than that of `Engine`, because the calling program may need memory for other purposes.
        given: dict[str, Any] = {"prompt_cost": 1 << 30, "memory_share": _MEMORY_SHARE.get(_device_type(model))}
        given |= {"graph": graph, "chunk": chunk, "recorder": recorder}
        self.engine = Engine(model, plan, share=share, samples=samples, vocabulary=vocabulary, **given | options)
        self._outputs = Outputs(self.engine)
        self._ids = map(str, count())

    @property
    def plan(self) -> Plan:
        """The applied plan with the options that its rungs chose. It has no CUDA graphs: the engine captures steps."""
        return self.engine.plan

    @property
    def model(self) -> PlannedModel:
        return self.engine.model

    @property
    def setup_s(self) -> float:
        """The seconds spent so far on allocating the cache and on capturing steps as CUDA graphs."""
        return self.engine.setup_s

    def new_state(self, batch: int = 1) -> Any:
        """Returns the empty memory state for `batch` texts. Raises if the model has no neural memory."""
        return self.engine.new_state(batch)

    def stream(
        self,
        prompts: Prompts,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> TokenStream:
        """Returns an iterator over tokens. Row r uses the seed `sampling.seed + r`.

        With `state`, prompt i continues row i of that state, and the `state` property of the returned stream is the
        state after the tokens generated so far.
        """
        sampling, stops = sampling or SamplingOptions(), frozenset(stop_tokens)
        requests = []
        for row, prompt in enumerate(read_prompts(prompts, self.engine.vocabulary)):
            own = replace(sampling, seed=(sampling.seed + row) % _SEEDS)
            requests.append(Request(next(self._ids), prompt, max_tokens, own, stops))
            self.engine.check(requests[-1])
        states = []
        if state is not None:
            self.engine.new_state()  # raises if the model has no neural memory
            cache: Any = self.model.new_cache(len(requests), 0)
            cache.restore(state)
            states = [cache.gather([row]).snapshot() for row in range(len(requests))]
        return TokenStream(self._outputs, requests, states)

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int = 256,
        stop_tokens: Iterable[int] = (),
        state: Any = None,
    ) -> list[Completion]:
        """Returns complete texts. Row r gets the text that it would get alone with the seed `sampling.seed + r`."""
        options: dict[str, Any] = {"max_tokens": max_tokens, "stop_tokens": stop_tokens, "state": state}
        with self.stream(prompts, sampling, **options) as stream:
            for _ in stream:
                pass
        if state is not None:
            after = stream.state
            for row, completion in enumerate(stream.completions):
                completion.state = after.rows([row])
        return stream.completions


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type
