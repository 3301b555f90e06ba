"""Answers the endpoints that generate no text: models, sessions, tokenization, health, metrics and version."""

import msgspec
from aiohttp import web

from redline.machine.version import VERSION
from redline.serving.api_requests import DetokenizeRequest, TokenizeRequest
from redline.serving.api_responses import ModelCard, ModelList
from redline.serving.errors import ApiError, invalid
from redline.serving.generation import SESSION, check_tokens
from redline.serving.metrics import CONTENT_TYPE
from redline.serving.services import CALL, SERVICES


async def models(request: web.Request) -> web.Response:
    return _json(ModelList([_card(request)]))


async def model(request: web.Request) -> web.Response:
    """Describes the served model. Answers 404 for any other name. The name in the path may contain slashes."""
    request.app[SERVICES].model.check_name(request.match_info["name"])
    return _json(_card(request))


async def health(request: web.Request) -> web.Response:
    """Answers 200 if a request can run now, and 503 while the server loads, drains, or restarts after a crash."""
    services = request.app[SERVICES]
    try:
        services.check_ready()
    except ApiError as error:
        return web.json_response({"status": error.code}, status=error.status, headers=error.headers)
    return web.json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVICES].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": VERSION})


async def delete_session(request: web.Request) -> web.Response:
    """Deletes a stored session of the caller's API key. Answers 404 if this key has no such session."""
    services, session = request.app[SERVICES], request.match_info["session"]
    services.check_ready()
    if not SESSION.fullmatch(session) or not await services.engine.delete_session(request[CALL].caller.salt, session):
        raise ApiError(404, f"There is no session {session[:200]!r}.", param="session_id", code="session_not_found")
    return web.json_response({"id": session, "object": "session", "deleted": True})


async def tokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = services.reader.read(request[CALL].body, TokenizeRequest)
    served = services.model
    served.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either prompt or messages.", "prompt")
    if body.messages is not None:
        tokens = await served.encode_chat(body.messages, body.tools, body.chat_template_kwargs)
    else:
        tokens = await served.encode(body.prompt or "", body.add_special_tokens is not False)
    return web.json_response({"count": len(tokens), "max_model_len": served.context, "tokens": tokens})


async def detokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = services.reader.read(request[CALL].body, DetokenizeRequest)
    services.model.check_name(body.model)
    check_tokens(body.tokens, services.model.tokens, "tokens")
    return web.json_response({"prompt": await services.model.decode(body.tokens)})


def _card(request: web.Request) -> ModelCard:
    served = request.app[SERVICES].model
    return ModelCard(served.name, served.created, served.context, served.name)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
