"""Implements `redline serve`, which starts an OpenAI-compatible server for a language model."""

from __future__ import annotations

import itertools
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import note, progress
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, Device, Strict
from redline.cli.signals import uninterrupted_imports
from redline.generation.choices import GENERATION_PRECISIONS
from redline.notation import format_seconds

if TYPE_CHECKING:
    from redline.serving.server import Server


def serve(
    model: Annotated[
        str,
        Argument(
            help="A folder with config.json, safetensors and tokenizer.json, or a model in the Hugging Face cache: "
            "OWNER/NAME, or OWNER/NAME@COMMIT."
        ),
    ],
    host: Annotated[str, Option(help="Address to listen on; other than loopback addresses need a key.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 selects a free one.")] = 8000,
    api_key: Annotated[
        str | None, Option(help="Key that requests must send; better in REDLINE_API_KEYS, which `ps` does not show.")
    ] = None,
    api_keys: Annotated[Path | None, Option(help="File with keys: one per line, or NAME = KEY.")] = None,
    name: Annotated[str | None, Option(help="The model's name in the API (default: the name of its folder).")] = None,
    device: Device = "auto",
    precision: Annotated[str, Option(help=f"{', '.join(GENERATION_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, Option(help=f"{PLAN_HELP} Default: a bundled plan.")] = None,
    max_rows: Annotated[int | None, Option(min=1, help="Texts that are generated at the same time.")] = None,
    token_budget: Annotated[int | None, Option(min=1, help="The largest number of tokens in one step.")] = None,
    blocks: Annotated[int | None, Option(min=1, help="Blocks of the KV cache (default: what fits in memory).")] = None,
    drafts: Annotated[int, Option(min=0, help="Tokens that prompt lookup proposes at a time; 0 for none.")] = 0,
    sessions: Annotated[
        Path | None, Option(help="Folder for the sessions of a model with neural memory (session_id in a request).")
    ] = None,
    engine: Annotated[str, Option(help="What generates the texts: redline or vllm.")] = "redline",
    vllm_python: Annotated[str | None, Option(help="The Python interpreter that has vLLM (default: this one).")] = None,
    vllm_option: Annotated[list[str] | None, Option(help="An option for vLLM's server; repeatable.")] = None,
    queue: Annotated[int | None, Option(min=1, help="Requests that may wait; further ones get 429.")] = None,
    queue_tokens: Annotated[int | None, Option(min=1, help="Prompt tokens that may wait; more get 429.")] = None,
    rate: Annotated[int, Option(min=0, help="Requests a minute for each key; 0 for no limit.")] = 0,
    concurrency: Annotated[int, Option(min=0, help="Requests at the same time for each key; 0 for no limit.")] = 0,
    body_mib: Annotated[int, Option(min=1, help="The largest request body in MiB.")] = 32,
    drain: Annotated[float, Option(min=0, help="Seconds that running requests get after SIGTERM or Ctrl-C.")] = 30.0,
    json_logs: Annotated[bool, Option("--json-logs", help="Log every request as one line of JSON on stderr.")] = False,
    strict: Strict = False,
) -> None:
    """Serve a language model with the OpenAI API.

    Example: redline serve Qwen/Qwen3-0.6B
    Example: redline serve my-model --host 0.0.0.0 --api-keys keys.txt --rate 60
    Example: redline serve my-model --engine vllm --vllm-python ~/vllm/bin/python
    """
    with uninterrupted_imports():
        from redline.serving.limits import Limits
        from redline.serving.log_lines import log_event, written_log
        from redline.serving.serve import serve as start_server
    given: dict[str, Any] = {"queue_requests": queue, "queue_tokens": queue_tokens}
    limits = Limits(
        **{name: value for name, value in given.items() if value is not None},
        rate_per_minute=rate,
        concurrency=concurrency,
        body_bytes=body_mib << 20,
        drain_s=drain,
    )
    options: dict[str, Any] = {"max_rows": max_rows, "token_budget": token_budget, "blocks": blocks}
    options["session_folder"] = None if sessions is None else str(sessions)
    options["drafts"] = drafts or None
    options["device"] = None if device == "auto" else device
    options["precision"] = None if precision == "auto" else precision
    options["plan"] = plan
    options["strict"] = strict or None
    with written_log(json_logs):
        begun_s = time.perf_counter()
        with nullcontext() if json_logs else LiveLine("loading the model …") as line:
            server = start_server(
                model,
                host=host,
                port=port,
                api_key=api_key,
                api_keys=api_keys,
                name=name,
                engine=engine,
                vllm_python=vllm_python,
                vllm_options=tuple(vllm_option or ()),
                limits=limits,
                on_progress=log_event if line is None else line.update,
                **options,
            )

        signals = itertools.count()

        def drain() -> None:
            text = "ending the running requests now"
            if next(signals) == 0:
                text = "finishing the running requests; press Ctrl-C again to end them now"
            log_event(text) if json_logs else note(text)
            server.drain()

        with server, _signals(drain):
            seconds = time.perf_counter() - begun_s
            if json_logs:
                log_event("ready", url=server.url, seconds=round(seconds, 3))
            else:
                _introduce(server, seconds)
            server.wait()
    if not json_logs:
        note("the server has ended.")


def _introduce(server: Server, seconds: float) -> None:
    served = server.services.model
    info = server.services.backend.info
    about = ", ".join(part for part in (info.device, info.plan, served.context and f"context {served.context}") if part)
    for url in server.urls:
        progress.print(f"serving [bold]{escape(served.name)}[/] at [bold]{escape(url)}[/]", soft_wrap=True)
    progress.print(escape(_example(server)), soft_wrap=True)
    progress.print(f"ready after {format_seconds(seconds)}: {escape(about or 'loaded')}", soft_wrap=True)


def _example(server: Server) -> str:
    """Returns a command line that calls the server."""
    path, body = "/v1/completions", '{"prompt": "The sea is", "max_tokens": 32}'
    if server.services.model.chat is not None:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    words = ["curl", f"{server.url}{path}", "-H", "Content-Type: application/json"]
    if server.services.keys.callers:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", body])


@contextmanager
def _signals(drain: Callable[[], object]) -> Iterator[None]:
    """Calls `drain` at each SIGTERM and Ctrl-C while the block runs. A second call ends running requests at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        drain()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
