"""Defines requests to the engine and its outputs: plain data without torch, which processes send to each other."""

from enum import StrEnum

from msgspec import Struct, field

from redline.errors import RedlineError

# The largest number of alternatives whose log-probabilities a request may ask for.
MOST_LOGPROBS = 20
_MOST_BIASES = 300


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, or a stop string that the caller found
    LENGTH = "length"  # `max_tokens` were generated
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"
    ERROR = "error"


class Grammar(Struct, frozen=True):
    """What the generated text must match. `kind` is json (any JSON object), json_schema, regex or lark."""

    kind: str
    text: str = ""


class SamplingOptions(Struct, frozen=True):
    """How tokens are drawn. The same options and prompt give the same text, alone or among other requests.

    With a temperature of 0, the most likely token is chosen. `frequency_penalty` and `presence_penalty` count generated
    tokens only, `repetition_penalty` also those of the prompt, as in vLLM and transformers. `logit_bias` maps token ids
    to numbers that are added to their logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RedlineError(f"temperature must be at least 0, not {self.temperature}.")
        if self.top_k < 0:
            raise RedlineError(f"top_k must be 0 (off) or more, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise RedlineError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise RedlineError(f"min_p must be from 0 to 1, not {self.min_p}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise RedlineError(f"repetition_penalty must be above 0, not {self.repetition_penalty}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise RedlineError(f"{name} must be from -2 to 2, not {getattr(self, name)}.")
        if len(self.logit_bias) > _MOST_BIASES or not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise RedlineError(f"logit_bias takes up to {_MOST_BIASES} tokens, each with a number from -100 to 100.")
        if not 0 <= self.seed < 2**63:
            raise RedlineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}.")


class Request(Struct, frozen=True):
    """One text to generate. `id` is unique among the requests that have not ended.

    Stop tokens are not sampled before `min_tokens` tokens. `logprobs` is the number of alternatives to
    report beside the chosen token (None: no log-probabilities). Requests share cached prefixes only with requests of
    the same `salt`. `session` continues a stored state of a model with neural memory, and stores it again at the end.
    `adapter` names a LoRA adapter that the engine has loaded.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingOptions = SamplingOptions()
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    salt: str = ""
    session: str | None = None
    adapter: str | None = None


class TokenLogprobs(Struct, frozen=True):
    """The log-probability of a token, and the most likely tokens with their log-probabilities, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Output(Struct, frozen=True):
    """The tokens that a request gained in one step. The stop token is not among them.

    `cached_tokens` counts the prompt tokens that were found in the cache. `error` says why a request ended with
    Finish.ERROR.
    """

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    cached_tokens: int = 0
    error: str = ""


class EngineStats(Struct, frozen=True):
    """The engine's state between two steps, and its counters since it started."""

    running: int
    waiting: int
    blocks: int
    blocks_used: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
