"""`redline generate`: streams text from a language model."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from redline.choices import GENERATION_PRECISIONS
from redline.cli.console import note, print_json, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, AsJson, Device, Strict
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError

if TYPE_CHECKING:
    from redline.generation.text_generator import GeneratedStream, GenerateOptions


def generate(
    model: Annotated[
        str,
        Argument(
            help="A folder with config.json, safetensors and tokenizer.json, or a model in the Hugging Face cache: "
            "OWNER/NAME, or OWNER/NAME@COMMIT."
        ),
    ],
    prompt: Annotated[str, Argument(help="The text to continue; - reads it from stdin.")],
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
    Example: echo "Once upon a time" | redline generate Qwen3-0.6B - --temperature 0.8 --seed 7
    """
    with uninterrupted_imports():
        from redline.generation.text_generator import TextGenerator
    text = _read_prompt(prompt)
    generator = TextGenerator(model, device=device, precision=precision, plan=plan, strict=strict)
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed}
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
