"""`redline generate`: text from a language model, as it comes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated

import typer

from redline.choices import GENERATION_PRECISIONS
from redline.cli.console import print_json, progress, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.plans import PLAN_HELP, read_plan
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.files.atomic import check_can_write

if TYPE_CHECKING:
    from redline.generation import TokenStream


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with config.json, safetensors and tokenizer.json, or a model in the Hugging Face cache: "
            "OWNER/NAME, or OWNER/NAME@COMMIT."
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at the most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among this many tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that have this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Choose among tokens this share as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes what came before less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help=f"{', '.join(GENERATION_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, typer.Option(help=f"{PLAN_HELP} A shipped one by default.")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="What a memory model remembers: read if it is there, written at the end.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse every unknown key of config.json.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the text and its speed as JSON.")] = False,
) -> None:
    """Generate text with a language model, streamed as it comes.

    Example: redline generate Llama-3.2-1B "The sea is", or from the Hugging Face cache: Qwen/Qwen3-0.6B
    Example: redline generate my-run/model "Call me Ishmael." --memory moby.safetensors
    Example: echo "Once upon a time" | redline generate Qwen3-0.6B - --temperature 0.8 --seed 7
    """
    with uninterrupted_imports():
        import torch

        from redline.generation import InferenceEngine, Sampling
        from redline.generation.folder import ModelFolder
        from redline.generation.precision import choose_holding
        from redline.generation.text_stream import TextStream
        from redline.machine.machine import Machine, resolve_device
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    text = _read_prompt(prompt)
    folder = ModelFolder.open(model)
    where = resolve_device(device)
    holding = choose_holding(Machine.detect(where), precision, None if plan is None else read_plan(plan))
    goes_on = memory is not None and memory.exists()
    if memory is not None:
        if not folder.remembers:
            raise RedlineError(f"--memory needs a model with neural memory; {model!r} has none.")
        check_can_write(memory.parent)
        if not memory.parent.exists():
            # It is read as well as written: a folder that is not there is a slip in the path, and would begin anew.
            raise RedlineError(f"--memory: there is no folder {str(memory.parent)!r}: correct the path, or make it.")
    # What begins every text stands at the beginning alone.
    tokens = folder.tokenizer.encode(text, add_special_tokens=not goes_on).ids
    if not tokens:
        raise RedlineError("the prompt is empty.")
    with warnings_as_sentences(), LiveLine("reading the model …"):
        loaded = folder.load(holding.dtype, torch.device(where), strict)
        engine = InferenceEngine(loaded, holding.plan, share=True, vocabulary=folder.tokens)
        state = None if memory is None else engine.new_state()
        if memory is not None and state is not None and goes_on:
            state = state.load(memory)
        stream = engine.stream([tokens], sampling, max_tokens=max_tokens, stop_tokens=folder.stop_tokens, state=state)
    pieces = TextStream(folder.tokenizer, tokens)
    said: list[str] = []

    def say(piece: str) -> None:
        said.append(piece)
        if not as_json and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    interrupted = False
    with stream:
        try:
            for (token,) in stream:
                if token is not None:
                    say(pieces.push(token))
        except KeyboardInterrupt:
            interrupted = True
        except RedlineError:
            # The sentence about it gets a line of its own.
            say("\n" if any(said) else "")
            raise
    say(pieces.finish())
    if not as_json:
        say("\n")
    if memory is not None:
        stream.state.save(memory)
    if as_json:
        about = {"model": Path(model).name, "device": where, "plan": str(engine.plan), "setup_s": engine.setup_s}
        print_json(about | _figures(stream, len(tokens)) | {"text": "".join(said)})
    if stream.completions[0].reason == "context":
        progress.print("[dim]the model's context is full: the text ends here.[/]", highlight=False)
    if interrupted:
        raise typer.Exit(130)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RedlineError("the prompt is not UTF-8 text.") from error
        return prompt
    with suppress(AttributeError):
        sys.stdin.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RedlineError("the prompt on stdin is not UTF-8 text.") from error


def _figures(stream: TokenStream, prompt_tokens: int) -> dict[str, object]:
    """Speed as it was seen from outside: the first token counts as prefill, the others by their distance."""
    completion = stream.completions[0]
    steps_ms = [1000 * seconds for seconds in stream.step_s]
    found: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "tokens": len(completion.tokens),
        "ended_by": completion.reason or "interrupt",
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
