"""Builds the HTTP application: its routes, and the checks that every request must pass."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from redline.errors import RedlineError
from redline.serving.chat import chat_completions
from redline.serving.completions import completions
from redline.serving.embeddings import embeddings
from redline.serving.engine_process import EngineProcess
from redline.serving.errors import ApiError, invalid
from redline.serving.forwarding import forward
from redline.serving.information import delete_session, detokenize, health, metrics, model, models, tokenize, version
from redline.serving.keys import ANYONE
from redline.serving.services import CALL, SERVICES, Call, Services
from redline.serving.site import add_page
from redline.web.access import Access, is_loopback

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("redline.serving")
requests_log = logging.getLogger("redline.serving.requests")
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json")
# The status that is logged if the client has closed the connection before the response. nginx uses the same one.
_CLIENT_CLOSED = 499


def new_app(services: Services, host: str, release: Callable[[web.Request], None]) -> web.Application:
    """Returns the application. It calls `release` when it has read a request, to remove the connection's deadline."""
    checks = _Checks(services, host, release)
    app = web.Application(
        client_max_size=services.limits.body_bytes, middlewares=[checks.errors, checks.access, checks.body]
    )
    app[SERVICES] = services
    app.on_response_prepare.append(_add_headers)
    is_ours = isinstance(services.backend, EngineProcess)
    app.router.add_post("/v1/chat/completions", chat_completions if is_ours else forward)
    app.router.add_post("/v1/completions", completions if is_ours else forward)
    app.router.add_post("/v1/embeddings", embeddings if is_ours else forward)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    if is_ours:
        app.router.add_delete("/v1/sessions/{session}", delete_session)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
    checks.open_paths |= add_page(app)
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request[CALL].id
    response.headers["X-Content-Type-Options"] = "nosniff"


@dataclass
class _Checks:
    """Contains the middlewares, outermost first.

    `errors` answers errors in the format of the OpenAI API, `access` checks the Host and Origin headers and the API
    key, and `body` reads the body within its limits.
    """

    services: Services
    host: str
    release: Callable[[web.Request], None]
    open_paths: frozenset[str] = frozenset({"/health"})

    def __post_init__(self) -> None:
        # `Access` is used only for the Host and Origin headers; the middleware `access` checks the API keys.
        self._access = Access("127.0.0.1")

    @web.middleware
    async def errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        request[CALL] = Call(given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16))
        begun_s = time.perf_counter()
        status = _CLIENT_CLOSED
        try:
            response = await self._answer(request, handler)
            status = response.status
            if self.services.keys.callers and request[CALL].caller is ANYONE:
                # If the server has keys, only callers with a key may keep a connection open.
                response.force_close()
            return response
        finally:
            self.release(request)
            _log_request(request, status, time.perf_counter() - begun_s)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return self._error(error)
        except RedlineError as error:
            return self._error(invalid(str(error)))
        except web.HTTPException as error:
            return self._error(_of_http(request, error))
        except ConnectionError as error:
            # A client that closes its connection usually cancels the handler. Do the same here, because aiohttp would
            # log any other exception as an error.
            raise asyncio.CancelledError from error
        except Exception:
            log.exception("a request failed: %s %s", request.method, request.path)
            return self._error(ApiError(500, "The server failed.", kind="server_error", code="internal_error"))

    def _error(self, error: ApiError) -> web.Response:
        self.services.metrics.refused(error.status)
        response = web.Response(
            body=error.json, status=error.status, headers=error.headers, content_type="application/json"
        )
        if error.status in (408, 413):
            response.force_close()  # the rest of the body was not read
        return response

    @web.middleware
    async def access(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        # Without a key, a web site could use a browser on this machine to reach this server by DNS rebinding. Checking
        # the Host header prevents this.
        is_open = not self.services.keys.callers and is_loopback(self.host)
        if is_open and (why_not := self._access.why_not_host(host)):
            raise ApiError(403, f"Refused: {why_not}", kind="permission_error", code="host_not_allowed")
        if origin is not None and (why_not := self._access.why_not_origin(origin, host)):
            raise ApiError(403, f"Refused: {why_not}", kind="permission_error", code="origin_not_allowed")
        if request.path not in self.open_paths:
            caller = self.services.keys.find(_bearer(request))
            if caller is None:
                message = "The API key is missing or wrong: send it as `Authorization: Bearer KEY`."
                raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
            request[CALL].caller = caller
        return await handler(request)

    @web.middleware
    async def body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            self.release(request)
            return await handler(request)
        if request.match_info.http_exception is None:
            request[CALL].body = await self._read(request)
        self.release(request)
        return await handler(request)

    async def _read(self, request: web.Request) -> bytes:
        limits = self.services.limits
        if not _JSON_TYPE.fullmatch(request.content_type):
            raise ApiError(415, "The header Content-Type must be application/json.", code="unsupported_media_type")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "Compressed bodies are not supported.", code="unsupported_encoding")
        too_large = ApiError(413, f"The body is larger than {limits.body_bytes:,} bytes.", code="body_too_large")
        if (request.content_length or 0) > limits.body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(limits.body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from error
        except web.RequestPayloadError as error:
            raise invalid("The body is not a valid HTTP body.") from error


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, f"There is no {request.method} {request.path[:200]}.", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{request.path[:200]} does not take {request.method[:20]}.", code="method_not_allowed")
    return ApiError(error.status, f"{error.reason}.", code="http_error")


def _bearer(request: web.Request) -> str | None:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def _log_request(request: web.Request, status: int, seconds: float) -> None:
    if not requests_log.isEnabledFor(logging.INFO):
        return
    fields = {
        "time": time.time(),
        "method": request.method[:20],
        "path": request.path[:200],
        "status": status,
        "seconds": round(seconds, 6),
        "request_id": request[CALL].id,
        "caller": request[CALL].caller.name,
    }
    requests_log.info("%s", msgspec.json.encode(fields).decode())
