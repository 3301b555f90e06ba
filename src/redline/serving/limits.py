"""Defines all limits of a server in one place."""

from dataclasses import dataclass

from redline.errors import RedlineError


@dataclass(frozen=True)
class Limits:
    """Holds the limits of a server. Requests beyond them get the status 400, 408, 413 or 429 with an error message.

    `queue_requests` limits the number of requests that wait for their first token, and `queue_tokens` the number of
    their prompt tokens. `rate_per_minute` and `concurrency` apply to each API key separately; 0 means no limit. A
    stream is closed if its client reads nothing for `stall_s` seconds.
    """

    body_bytes: int = 32 << 20
    nesting: int = 64
    choices: int = 64
    stops: int = 16
    stop_characters: int = 1024
    schema_bytes: int = 64 << 10
    tools: int = 128
    embedding_inputs: int = 2048
    queue_requests: int = 1024
    queue_tokens: int = 1 << 22
    rate_per_minute: int = 0
    concurrency: int = 0
    connections: int = 4096
    request_s: float = 15.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    stall_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("rate_per_minute", "concurrency", "drain_s") else 1e-3
            if value < least:
                raise RedlineError(f"the limit {name} must not be {value}.")
