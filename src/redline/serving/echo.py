"""Prepares the prompt that is returned before its completion if a request sets `echo`."""

from dataclasses import dataclass

from redline.serving.api_responses import TextLogprobs
from redline.serving.logprobs import prompt_logprobs
from redline.serving.services import Services


@dataclass(frozen=True)
class Echo:
    """Holds the text of a prompt, and the log-probabilities of its tokens if the request asks for them."""

    text: str = ""
    logprobs: TextLogprobs | None = None


async def read_echoes(
    services: Services, texts: list[str] | list[list[int]], prompts: list[list[int]], logprobs: int | None
) -> list[Echo]:
    """Returns the echo of each prompt; the engine computes log-probabilities of prompts between two steps."""
    model = services.model
    found: list[TextLogprobs | None] = [None] * len(prompts)
    if logprobs is not None:
        scores = [(await services.engine.score([prompt], logprobs))[0] for prompt in prompts]
        found = [prompt_logprobs(prompt, row, model.texts) for prompt, row in zip(prompts, scores, strict=True)]
    shown = [
        text if isinstance(text, str) else await model.decode(prompt)
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    return [Echo(text, row) for text, row in zip(shown, found, strict=True)]
