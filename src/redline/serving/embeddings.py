"""Answers POST /v1/embeddings."""

import base64
import struct

import msgspec
from aiohttp import web

from redline.serving.api_requests import EmbeddingRequest
from redline.serving.api_responses import Embedding, EmbeddingList
from redline.serving.completions import encode_texts, split_texts
from redline.serving.errors import context_exceeded, invalid
from redline.serving.services import CALL, SERVICES

# The largest number of tokens that are sent to the engine at once. The engine computes embeddings between two steps of
# generation, so large groups would delay the running texts.
_GROUP_TOKENS = 8192


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Answers with an embedding of each text.

    `pooling` selects the mean of the model's last hidden states, or the last hidden state of the last token.
    """
    services = request.app[SERVICES]
    body = services.reader.read(request[CALL].body, EmbeddingRequest)
    model, limits = services.model, services.limits
    model.check_name(body.model)
    if body.dimensions is not None:
        raise invalid("This model has embeddings of one size only.", "dimensions", "unsupported_parameter")
    texts = split_texts(body.input, "input", limits.embedding_inputs)
    ticket = services.admit(request[CALL].caller, 1)
    try:
        prompts = await encode_texts(model, texts, "input")
        for prompt in prompts:
            if model.context is not None and len(prompt) > model.context:
                raise context_exceeded(len(prompt), 0, model.context)
        tokens = sum(map(len, prompts))
        ticket.queue(tokens)
        vectors: list[list[float]] = []
        for group in _groups(prompts):
            vectors += await services.engine.embed(group, body.pooling or "mean")
    finally:
        ticket.close()
    shown = [Embedding(index, _encoded(vector, body.encoding_format)) for index, vector in enumerate(vectors)]
    answer = EmbeddingList(shown, model.name, {"prompt_tokens": tokens, "total_tokens": tokens})
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _groups(prompts: list[list[int]]) -> list[list[list[int]]]:
    groups: list[list[list[int]]] = [[]]
    tokens = 0
    for prompt in prompts:
        if groups[-1] and tokens + len(prompt) > _GROUP_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(prompt)
        tokens += len(prompt)
    return groups


def _encoded(vector: list[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
