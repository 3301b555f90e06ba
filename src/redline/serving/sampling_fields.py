"""Converts the sampling fields of a request to the engine's options. Absent fields get the model's defaults."""

import secrets
from dataclasses import dataclass, field

from redline.errors import RedlineError
from redline.generation.request import MOST_LOGPROBS, SamplingOptions
from redline.serving.api_requests import SamplingFields
from redline.serving.errors import invalid
from redline.serving.limits import Limits

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Holds the values of absent fields: those of generation_config.json, otherwise those of the OpenAI API."""

    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, generation_config: dict[str, object]) -> "SamplingDefaults":
        found = {name: generation_config.get(name) for name in _DEFAULTED}
        if generation_config.get("do_sample") is False:
            found["temperature"] = 0.0
        numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
        try:
            _options({"temperature": 1.0} | numbers)
        except RedlineError:
            numbers = {}
        return cls({"temperature": 1.0} | numbers)


def sampling_of(fields: SamplingFields, defaults: SamplingDefaults) -> SamplingOptions:
    """Returns the options of choice 0; choice i uses `seed + i`. Chooses a random seed if the request has none."""
    named = (*_DEFAULTED, "presence_penalty", "frequency_penalty")
    given = {name: value for name in named if (value := getattr(fields, name)) is not None}
    values = defaults.values | given
    if given.get("top_k") == -1:  # disables top_k, as in vLLM
        values["top_k"] = 0
    try:
        return _options(values, _biases(fields.logit_bias or {}), _seed(fields.seed))
    except RedlineError as error:
        message = str(error)
        raise invalid(message, message.split(" ", 1)[0]) from error


def _options(values: dict[str, float], biases: dict[int, float] | None = None, seed: int = 0) -> SamplingOptions:
    # Limits top_k, because larger numbers do not fit in the engine's integers. No vocabulary is larger than this limit.
    top_k = min(int(values.get("top_k", 0)), 1 << 31)
    return SamplingOptions(**{**values, "top_k": top_k}, logit_bias=biases or {}, seed=seed)  # pyrefly: ignore


def _biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise invalid('logit_bias maps token ids to numbers, as in {"50256": -100}.', "logit_bias") from error


def _seed(given: int | None) -> int:
    # Clients also send negative seeds; the modulo makes them non-negative.
    return secrets.randbits(62) if given is None else given % (1 << 62)


def stops_of(fields: SamplingFields, limits: Limits) -> tuple[str, ...]:
    """Returns the distinct stop strings that are not empty. Raises an ApiError if they exceed the limits."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > limits.stops:
        raise invalid(f"stop takes at most {limits.stops} texts, not {len(stops)}.", "stop")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise invalid(f"each stop text may have at most {limits.stop_characters} characters.", "stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def choices_of(fields: SamplingFields, limits: Limits) -> int:
    """Returns the number of texts that the request asks for per prompt (the field n)."""
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= limits.choices:
        raise invalid(f"n must be from 1 to {limits.choices}, not {count}.", "n")
    return count


def check_logprobs(count: int, param: str) -> int:
    if not 0 <= count <= MOST_LOGPROBS:
        raise invalid(f"{param} must be from 0 to {MOST_LOGPROBS}, not {count}.", param)
    return count
