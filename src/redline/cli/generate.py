"""`redline generate`: streams text from a language model."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from redline.cli.console import fail, note, print_json, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, AsJson, Device, Strict
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.generation.choices import GENERATION_PRECISIONS

if TYPE_CHECKING:
    from redline.generation.text_generator import GeneratedStream, GenerateOptions, TextGenerator


def generate(
    model: Annotated[
        str,
        Argument(
            help="A folder with config.json, safetensors and tokenizer.json, or a model in the Hugging Face cache: "
            "OWNER/NAME, or OWNER/NAME@COMMIT."
        ),
    ],
    prompt: Annotated[str | None, Argument(help="The text to continue; - reads it from stdin.")] = None,
    prompts: Annotated[
        Path | None, Option(help="A file with a prompt per line, as JSON; also OpenAI's batch format. Needs --out.")
    ] = None,
    out: Annotated[Path | None, Option(help="The file for the results of --prompts; continued if it exists.")] = None,
    max_tokens: Annotated[int, Option(help="The largest number of tokens to generate.")] = 256,
    temperature: Annotated[float, Option(help="0 selects the most likely token; higher values are more random.")] = 0.0,
    top_k: Annotated[int, Option(help="Sample only from this many of the most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[float, Option(help="Sample only from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, Option(help="Sample only from tokens with at least this fraction of the top probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, Option(help="Values above 1 make repeated tokens less likely.")] = 1.0,
    seed: Annotated[int, Option(help="The same seed gives the same text.")] = 0,
    device: Device = "auto",
    precision: Annotated[str, Option(help=f"{', '.join(GENERATION_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, Option(help=f"{PLAN_HELP} Default: a bundled plan.")] = None,
    memory: Annotated[
        Path | None, Option(help="File with the state of the neural memory: read if it exists, written at the end.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a language model.

    Example: redline generate Llama-3.2-1B "The sea is", or from the Hugging Face cache: Qwen/Qwen3-0.6B
    Example: redline generate my-run/model "Call me Ishmael." --memory moby.safetensors
    Example: redline generate my-model --prompts prompts.jsonl --out results.jsonl --max-tokens 64
    Example: echo "Once upon a time" | redline generate Qwen3-0.6B - --temperature 0.8 --seed 7
    """
    with uninterrupted_imports():
        from redline.generation.text_generator import TextGenerator
    if (prompt is None) == (prompts is None):
        raise RedlineError("give either a prompt or a file of prompts (--prompts).")
    if (prompts is None) != (out is None):
        raise RedlineError("--prompts and --out belong together: give both.")
    if prompts is not None and memory is not None:
        raise RedlineError("--memory belongs to a single text: it cannot be used with --prompts.")
    generator = TextGenerator(model, device=device, precision=precision, plan=plan, strict=strict)
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed}
    if prompts is not None and out is not None:
        _run_file(generator, prompts, out, options, as_json)
        return
    text = _read_prompt(prompt or "")
    with warnings_as_sentences(), LiveLine("reading the model …"):
        stream = generator.stream(text, memory=memory, **options)

    def write(piece: str) -> None:
        if not as_json and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    interrupted = False
    with stream:
        try:
            for piece in stream:
                write(piece)
        except KeyboardInterrupt:
            interrupted = True
        except RedlineError:
            # Ends the line of the text, so that the error message starts on a new line.
            write("\n" if stream.text else "")
            raise
        write(stream.finish() + "\n")
    if as_json:
        engine = generator.engine
        about = {"model": Path(model).name, "device": str(generator.device), "plan": str(engine.plan)}
        print_json(about | {"setup_s": engine.setup_s} | _figures(stream) | {"text": stream.text})
    if stream.text.reason == "context":
        note("the model's context is full: the text ends here.")
    if interrupted:
        raise typer.Exit(130)


def _run_file(generator: TextGenerator, prompts: Path, out: Path, options: GenerateOptions, as_json: bool) -> None:
    """Generates the texts of a file. Exits with 1 if a result is an error."""
    from redline.generation.batch_file import check_jobs, find_failures

    check_jobs(prompts)  # before the weights are read, which takes minutes for a large model
    done = total = new = 0
    before: int | None = None
    interrupted = False
    with warnings_as_sentences(), LiveLine("reading the model …") as line:

        def report(now: int, of: int) -> None:
            nonlocal done, total, before
            done, total, before = now, of, now if before is None else before
            line.count("generating", done, total, "text", before=before)

        try:
            new = generator.run_file(prompts, out, report, **options)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        note(f"interrupted after {done:,} of {total:,} texts: the same command goes on from here.")
        raise typer.Exit(130)
    failed, error = find_failures(out)
    if as_json:
        print_json({"texts": total, "new": new, "failed": failed, "first_error": error or None, "out": str(out)})
    else:
        note(f"{new:,} new results, {total:,} in all: {out}")
    if failed:
        fail(f"{failed:,} of {total:,} texts failed; the first error is that of {error}")
        raise typer.Exit(1)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    with suppress(AttributeError):
        sys.stdin.reconfigure(encoding="utf-8")  # pyrefly: ignore[missing-attribute]
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RedlineError("the prompt on stdin is not UTF-8 text.") from error


def _figures(stream: GeneratedStream) -> dict[str, object]:
    """Returns the speed that a caller sees: the time to the first token (prefill), and the intervals between tokens."""
    text = stream.text
    steps_ms = [1000 * seconds for seconds in stream.step_s]
    found: dict[str, object] = {
        "prompt_tokens": stream.prompt_tokens,
        "tokens": len(text.tokens),
        "ended_by": text.reason or "interrupt",
        "prefill_ms": 1000 * stream.prefill_s,
        "tokens_per_s": None,
        "token_ms_p50": None,
        "token_ms_p95": None,
    }
    if steps_ms:
        twentieths = quantiles(steps_ms, n=20, method="inclusive") if len(steps_ms) > 1 else steps_ms * 19
        found |= {
            "tokens_per_s": 1000 * len(steps_ms) / sum(steps_ms),
            "token_ms_p50": twentieths[9],
            "token_ms_p95": twentieths[18],
        }
    return found
