"""`redline bench serve`: sends load to an OpenAI-compatible server and measures what its clients see."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import fail, note, plain_table, print_json, results, wrote
from redline.cli.live_line import LiveLine
from redline.cli.options import ApiKeyFile, AsJson, Page, read_api_key
from redline.errors import RedlineError
from redline.files.atomic import check_can_write_file, write_text
from redline.notation import format_seconds, parse_seconds, parse_server_url
from redline.serving.choices import SERVER_ENDPOINTS

if TYPE_CHECKING:
    from redline.serving.load.arrivals import Load
    from redline.serving.load.client import Target
    from redline.serving.load.prompts import Prompts
    from redline.serving.load.result import LoadResult
    from redline.serving.load.run import Extent, Progress
    from redline.serving.load.summary import Level, Limits, Spread


def bench_serve(
    url: Annotated[str, Argument(help="The server's address, such as http://127.0.0.1:8000.")],
    rate: Annotated[str, Option(help="Requests per second, whatever the server does; several levels as 1,2,4.")] = "",
    burstiness: Annotated[
        float, Option(help="Of the arrivals: 1 for a Poisson process, below 1 for bursts, inf for equal intervals.")
    ] = 1.0,
    concurrency: Annotated[
        str, Option(help="Clients that each wait for their answer instead of a rate; several levels as 1,8,64.")
    ] = "",
    requests: Annotated[
        int | None, Option(help="Requests per level (default: 100, or as many as --duration takes).")
    ] = None,
    duration: Annotated[str | None, Option(help="No new requests after this time of a level, such as 30s.")] = None,
    dataset: Annotated[str, Option(help="words, tokens (random token ids), or a file of JSON lines.")] = "words",
    input_span: Annotated[str, Option("--input", help="Tokens per prompt, such as 512 or 100-1024.")] = "512",
    output_span: Annotated[str, Option("--output", help="Tokens per answer, such as 256 or 16-256.")] = "128",
    prefix: Annotated[int, Option(help="Tokens that prompts have in common at their start.")] = 0,
    prefix_share: Annotated[float, Option(help="The share of prompts that start with the prefix.")] = 1.0,
    vocabulary: Annotated[int, Option(help="Random token ids are below this.")] = 10_000,
    model: Annotated[str | None, Option(help="The model's name (default: the server's first).")] = None,
    endpoint: Annotated[
        str, Option(help=f"{', '.join(SERVER_ENDPOINTS)}; auto sends messages to chat and prompts to completions.")
    ] = "auto",
    ignore_eos: Annotated[
        bool, Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length, with random prompts.")
    ] = True,
    temperature: Annotated[float, Option(help="Of the sampling.")] = 0.0,
    seed: Annotated[int, Option(help="The same seed gives the same prompts and arrival times.")] = 0,
    limit: Annotated[
        str, Option(help="Count the requests within these latencies, such as ttft=500ms,tpot=50ms,gap=200ms,e2e=10s.")
    ] = "",
    abandon: Annotated[float, Option(help="The share of clients that leave before their answer is complete.")] = 0.0,
    warmup: Annotated[int, Option(min=0, help="Requests before the first level that are not measured.")] = 0,
    processes: Annotated[
        int, Option(min=1, max=64, help="Processes that share the load, for more than some 10,000 tokens/s.")
    ] = 1,
    timeout: Annotated[str, Option(help="Time limit of one request.")] = "10m",
    api_key_file: ApiKeyFile = None,
    save: Annotated[Path | None, Option(help="Write one JSON line per level to this file.")] = None,
    save_requests: Annotated[Path | None, Option(help="Write one JSON line per request to this file.")] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Measure an OpenAI-compatible server under load: latencies, throughput and goodput.

    Example: redline bench serve http://127.0.0.1:8000 --rate 1,2,4,8 --duration 30s --page load.html
    Example: redline bench serve http://127.0.0.1:8000 --concurrency 64 --requests 500 --limit ttft=500ms,tpot=50ms
    """
    from redline.serving.load.client import Target
    from redline.serving.load.run import Extent
    from redline.serving.load.summary import Limits

    if endpoint not in SERVER_ENDPOINTS:
        raise RedlineError(f"unknown endpoint {endpoint!r}: use one of {', '.join(SERVER_ENDPOINTS)}.")
    loads = _loads(rate, concurrency, burstiness)
    limits = Limits.parse(limit)
    prompts, is_random = _prompts(dataset, input_span, output_span, seed, prefix, prefix_share, vocabulary)
    count = 100 if requests is None and duration is None else requests
    extent = Extent(count, None if duration is None else parse_seconds(duration), abandon, seed)
    for path in (save, save_requests, page):
        if path is not None:
            check_can_write_file(path)
    extra: dict[str, Any] = {"temperature": temperature}
    extra |= {"ignore_eos": True} if ignore_eos and is_random else {}
    key = read_api_key(api_key_file)
    target = Target(parse_server_url(url), model or "", endpoint, key, extra, parse_seconds(timeout))
    settings = {
        "prompts": str(prompts),
        "limits": limit,
        "seed": seed,
        "abandon_share": abandon,
        "processes": processes,
    }
    result = asyncio.run(_run(target, prompts, loads, extent, limits, warmup, settings, save, processes))
    if save is not None:
        wrote(save)
    if save_requests is not None:
        result.save_requests(save_requests)
        wrote(save_requests)
    if page is not None:
        from redline.serving.load.page import render_load_page

        write_text(page, render_load_page(result))
        wrote(page)
    if as_json:
        print_json({**result.about, "levels": result.rows()})
    else:
        _print(result.levels)
    failed = sum(level.failed for level in result.levels)
    if failed:
        worst = max(((n, why) for level in result.levels for why, n in level.errors.items()), default=(0, ""))
        fail(f"{failed:,} requests failed; the most frequent error: {worst[1].rstrip('.')}.")
    raise typer.Exit(1 if failed else 0)


def _loads(rates: str, concurrencies: str, burstiness: float) -> list[Load]:
    from redline.serving.load.arrivals import Load

    if bool(rates) == bool(concurrencies):
        both = ", not both" if rates else ""
        raise RedlineError(f"give either --rate (requests per second) or --concurrency (clients){both}.")
    try:
        if rates:
            return [Load(rate=float(part), burstiness=burstiness) for part in rates.split(",")]
        return [Load(concurrency=int(part)) for part in concurrencies.split(",")]
    except ValueError as error:
        option, text = ("--rate", rates) if rates else ("--concurrency", concurrencies)
        raise RedlineError(f"{option}: {text!r} is not a list of numbers such as 1,2,4.") from error


def _prompts(
    dataset: str, input_span: str, output_span: str, seed: int, prefix: int, prefix_share: float, vocabulary: int
) -> tuple[Prompts, bool]:
    """Returns the prompts, and whether they are random."""
    from redline.serving.load.prompts import DATASETS, RandomPrompts, Span, read_prompts

    answers = Span.parse(output_span)
    if dataset in DATASETS:
        asked = Span.parse(input_span)
        return RandomPrompts(dataset, asked, answers, seed, prefix, prefix_share, vocabulary), True
    if prefix:
        raise RedlineError("--prefix is for random prompts: leave it out with a file.")
    if not Path(dataset).exists():
        raise RedlineError(f"unknown dataset {dataset!r}: use {', '.join(DATASETS)}, or a file of JSON lines.")
    return read_prompts(Path(dataset), answers, seed), False


async def _run(
    target: Target,
    prompts: Prompts,
    loads: list[Load],
    extent: Extent,
    limits: Limits,
    warmup: int,
    settings: dict[str, Any],
    save: Path | None,
    processes: int,
) -> LoadResult:
    from redline.serving.load.about import describe_client, describe_server, find_model
    from redline.serving.load.arrivals import Load
    from redline.serving.load.processes import run_level_in_processes
    from redline.serving.load.result import LoadResult
    from redline.serving.load.run import Extent, run_level
    from redline.serving.load.summary import summarize

    target = replace(target, model=await find_model(target))
    about = {"server": await describe_server(target), "request": dict(target.extra), **settings}
    result = LoadResult(about)
    with LiveLine("warming up …") as line:
        first = 0
        if warmup:
            await run_level(target, prompts, Load(concurrency=min(warmup, 256)), Extent(warmup), first)
            first += warmup
        for load in loads:

            def show(now: Progress, load: Load = load) -> None:
                detail = f"{now.running:,} running, {now.output_tokens:,} tokens"
                line.count(str(load), now.ended, extent.requests, "request", detail)

            line.restart()
            if processes > 1:
                # Nothing else runs in this event loop.
                found = run_level_in_processes(processes, target, prompts, load, extent, first, show)
            else:
                found = await run_level(target, prompts, load, extent, first, show)
            # The prompts of the next level have new numbers, so that the server's prefix cache does not hold them yet.
            # Some numbers may stay unused if several processes ran a level with a time limit, because each process
            # counts its own requests.
            first = max((outcome.number + 1 for outcome in found), default=first)
            if not result.levels:
                # Imported after a measurement, because it needs torch.
                from redline.ladder.search.run_log import command_line

                result = replace(result, about=describe_client(command_line(sys.argv)) | about)
            result = result.plus(summarize(load, found, limits), found)
            # Saved after each level, so that an interrupted run keeps its complete levels.
            if save is not None:
                result.save(save)
    return result


def _print(levels: tuple[Level, ...]) -> None:
    percentiles = "p50 / p95 / p99"
    heads = ("requests", "tokens/s", f"TTFT {percentiles}", f"ITL {percentiles}", f"E2E {percentiles}", "cached")
    has_limits = any(level.goodput_per_s is not None for level in levels)
    table = plain_table("load", *heads, *(["goodput"] if has_limits else []))
    for level in levels:
        good = f"{level.goodput_per_s:.3g}/s ({level.good / level.requests:.0%})" if level.good is not None else ""
        table.add_row(
            escape(str(level.load)),
            _counts(level),
            f"{level.output_tokens_per_s:,.0f}",
            *map(_spread, (level.ttft, level.itl, level.e2e)),
            f"{level.cached_share:.0%}",
            *([good] if has_limits else []),
        )
    results.print(table)
    late = max((level.late.p99_s for level in levels if level.late), default=0.0)
    if late > 0.02:
        note(f"the client sent requests up to {format_seconds(late)} late (p99): it may be the bottleneck.", "yellow")
    if any(level.done and level.counted < level.done for level in levels):
        note("some answers had no usage: tokens/s leaves them out.", "yellow")


def _counts(level: Level) -> str:
    others = ((level.rejected, "rejected"), (level.failed, "failed"), (level.abandoned, "left"))
    return ", ".join([f"{level.done:,} done", *(f"{count:,} {what}" for count, what in others if count)])


def _spread(found: Spread | None) -> str:
    if found is None:
        return ""
    return " / ".join(format_seconds(value) for value in (found.p50_s, found.p95_s, found.p99_s))
