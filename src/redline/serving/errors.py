"""Defines the errors of the API, which are sent in the format of the OpenAI API."""

from typing import Any

import msgspec

from redline.errors import RedlineError


class ApiError(RedlineError):
    """Is answered with the given HTTP status. `retry_after_s` is sent as the header Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(self.body)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_exceeded(prompt_tokens: int, max_tokens: int, context: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context} tokens. However, you requested {prompt_tokens + max_tokens} "
        f"tokens ({prompt_tokens} in the prompt, {max_tokens} for the completion). Shorten the prompt or max_tokens."
    )
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def too_many(message: str, retry_after_s: int, code: str = "rate_limit_exceeded") -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after_s=retry_after_s)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after_s=retry_after_s)


def engine_died() -> ApiError:
    """Returns the error of a request whose engine ended before its answer was complete."""
    return unavailable("The engine stopped before the answer was complete; it is being restarted.", "engine_died")
