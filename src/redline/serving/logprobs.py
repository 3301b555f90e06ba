"""Converts log-probabilities to the formats of the chat completions API and of the older completions API."""

from redline.generation.request import TokenLogprobs
from redline.serving.api_responses import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from redline.serving.token_texts import TokenTexts

# Replaces the log-probability of tokens that cannot be sampled (minus infinity), because JSON has no infinity. vLLM
# uses the same value.
_LEAST = -9999.0


def chat_logprobs(found: list[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    content = []
    for entry in found:
        top = [
            TopLogprob(texts.text_of(token), max(value, _LEAST), [*texts.bytes_of(token)]) for token, value in entry.top
        ]
        text, data = texts.text_of(entry.token), [*texts.bytes_of(entry.token)]
        content.append(TokenLogprob(text, max(entry.logprob, _LEAST), data, top))
    return ChatLogprobs(content)


def text_logprobs(found: list[TokenLogprobs], texts: TokenTexts, offset: int) -> TextLogprobs:
    """Returns the format of the completions API. `offset` is the number of characters before the first token."""
    tokens = [texts.text_of(entry.token) for entry in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    chosen: list[float | None] = [max(entry.logprob, _LEAST) for entry in found]
    top: list[dict[str, float] | None] = []
    for entry in found:
        likely = {texts.text_of(token): max(value, _LEAST) for token, value in entry.top}
        # The chosen token is listed even if it is not one of the most likely tokens, as in vLLM.
        top.append(likely | {texts.text_of(entry.token): max(entry.logprob, _LEAST)})
    return TextLogprobs(tokens, chosen, top, offsets)


def prompt_logprobs(prompt: list[int], found: list[TokenLogprobs], texts: TokenTexts) -> TextLogprobs:
    """Returns the log-probabilities of a prompt. The first token has none, because no token precedes it."""
    first = texts.text_of(prompt[0])
    rest = text_logprobs(found, texts, len(first))
    return joined_logprobs(TextLogprobs([first], [None], [None], [0]), rest)


def joined_logprobs(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
