"""Admission control: decides whether a request waits or is refused with 429, and when a refused client should retry.

In an unbounded queue, an overloaded server would let every request wait until its client has given up. Therefore the
number of requests that wait for their first token and the number of their prompt tokens are bounded. In addition, each
API key can have a limit on its requests per minute and on its concurrent requests.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from redline.serving.errors import too_many
from redline.serving.keys import Caller
from redline.serving.limits import Limits

_LONGEST_RETRY_S = 60
# The weight of the newest wait in the moving average that Retry-After is derived from.
_NEWEST = 0.1


@dataclass
class _Usage:
    """Counts what one caller uses. At the time `at_s`, its rate limit allowed it to send `credit` more requests."""

    credit: float
    at_s: float
    running: int = 0


class Ticket:
    """Counts an admitted HTTP request as waiting until its first token, and as running until `close`.

    The caller must always call `close`.
    """

    def __init__(self, admission: "Admission", usage: _Usage, requests: int) -> None:
        self._admission, self._usage = admission, usage
        self._requests, self._tokens = requests, 0
        self._begun_s = admission.now_s()
        self._waits = True
        self._closed = False

    def queue(self, tokens: int) -> None:
        """Adds the tokens of the prompts, which are counted after admission. Raises 429 if too many wait."""
        self._admission.check_tokens(tokens)
        self._tokens = tokens
        self._admission.waiting_tokens += tokens

    def first_token(self) -> None:
        """Removes the request from the queue, because it has its first token. May be called repeatedly."""
        if self._waits:
            self._waits = False
            self._admission.leave_queue(self._requests, self._tokens, self._admission.now_s() - self._begun_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._waits:
            self._waits = False
            self._admission.leave_queue(self._requests, self._tokens, None)
        self._usage.running -= 1
        self._admission.running -= 1


class Admission:
    """Admits or refuses the requests of a server. All methods must be called in one event loop."""

    def __init__(self, limits: Limits, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limits, self.now_s = limits, now_s
        self.waiting = self.waiting_tokens = self.running = 0
        self._usages: dict[str, _Usage] = {}
        self._mean_wait_s = 0.0

    def admit(self, caller: Caller, requests: int = 1) -> Ticket:
        """Returns a ticket, or raises 429. `requests` is the number of texts that the HTTP request asks for."""
        limits = self._limits
        usage = self._usage(caller)
        if limits.concurrency and usage.running >= limits.concurrency:
            raise too_many(f"This API key already has {usage.running} requests in flight.", self.retry_after_s)
        if self.waiting and self.waiting + requests > limits.queue_requests:
            message = f"The server is overloaded: {self.waiting} requests are waiting."
            raise too_many(message, self.retry_after_s, "overloaded")
        self._spend(usage)
        usage.running += 1
        self.running += 1
        self.waiting += requests
        return Ticket(self, usage, requests)

    def check_tokens(self, tokens: int) -> None:
        if self.waiting_tokens and self.waiting_tokens + tokens > self._limits.queue_tokens:
            message = f"The server is overloaded: {self.waiting_tokens} prompt tokens are waiting."
            raise too_many(message, self.retry_after_s, "overloaded")

    def leave_queue(self, requests: int, tokens: int, waited_s: float | None) -> None:
        self.waiting -= requests
        self.waiting_tokens -= tokens
        if waited_s is not None:
            self._mean_wait_s += _NEWEST * (waited_s - self._mean_wait_s)

    @property
    def retry_after_s(self) -> int:
        """The value of the header Retry-After: the average recent wait in the queue, in whole seconds."""
        return min(_LONGEST_RETRY_S, max(1, math.ceil(self._mean_wait_s)))

    def _usage(self, caller: Caller) -> _Usage:
        return self._usages.setdefault(caller.name, _Usage(float(self._limits.rate_per_minute), self.now_s()))

    def _spend(self, usage: _Usage) -> None:
        """Takes one request from the caller's rate, which refills evenly and holds at most one minute's requests."""
        rate = self._limits.rate_per_minute
        if not rate:
            return
        now_s = self.now_s()
        usage.credit = min(float(rate), usage.credit + (now_s - usage.at_s) * rate / 60)
        usage.at_s = now_s
        if usage.credit < 1:
            seconds = math.ceil((1 - usage.credit) * 60 / rate)
            raise too_many(f"This API key may send {rate} requests a minute.", seconds)
        usage.credit -= 1
