"""What a server accepts: one frozen dataclass, so that every limit is visible in one place."""

from dataclasses import dataclass

from redline.errors import RedlineError


@dataclass(frozen=True)
class Limits:
    """The limits of a server. Requests beyond them get the status 400, 413 or 429 with an explanation.

    `queue_requests` and `queue_tokens` bound the requests that wait for their first token, and the tokens of their
    prompts. `rate_per_minute` and `concurrency` hold for each API key; 0 switches them off. `stall_s` is how long a
    client may refuse to read a stream before it is closed.
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
