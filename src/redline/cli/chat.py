"""`redline chat`: a conversation with a language model in the terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from redline.cli.console import fail, note, progress, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, ApiKeyFile, Device, Strict, read_api_key
from redline.cli.signals import Termination, uninterrupted_imports
from redline.errors import RedlineError
from redline.generation.choices import GENERATION_PRECISIONS

if TYPE_CHECKING:
    from redline.chat.conversation import Conversation
    from redline.chat.model import AnswerOptions, ChatModel


def chat(
    model: Annotated[
        str | None,
        Argument(
            help="A folder with a model, a model in the Hugging Face cache (OWNER/NAME), or with --server the name of "
            "a model there (default: its first; - also stands for it)."
        ),
    ] = None,
    question: Annotated[str | None, Argument(help="Answer this question and exit.")] = None,
    server: Annotated[
        str | None, Option(help="Talk to this OpenAI-compatible server, such as http://127.0.0.1:8000.")
    ] = None,
    system: Annotated[str | None, Option(help="The system prompt.")] = None,
    load: Annotated[Path | None, Option(help="Continue the conversation in this JSON file.")] = None,
    max_tokens: Annotated[int | None, Option(help="The largest number of tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, Option(help="0 selects the most likely token; higher values are more random.")
    ] = None,
    top_k: Annotated[int | None, Option(help="Sample only from this many of the most likely tokens.")] = None,
    top_p: Annotated[
        float | None, Option(help="Sample only from the most likely tokens with this total probability.")
    ] = None,
    min_p: Annotated[
        float | None, Option(help="Sample only from tokens with at least this fraction of the top probability.")
    ] = None,
    repetition_penalty: Annotated[float | None, Option(help="Values above 1 make repeated tokens less likely.")] = None,
    seed: Annotated[int | None, Option(help="The same seed gives the same answers.")] = None,
    device: Device = "auto",
    precision: Annotated[str, Option(help=f"{', '.join(GENERATION_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, Option(help=f"{PLAN_HELP} Default: a bundled plan.")] = None,
    strict: Strict = False,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Chat with a language model, of this machine or of a server.

    Example: redline chat Qwen/Qwen3-0.6B, or with one question: redline chat Qwen/Qwen3-0.6B "What is a prime number?"
    Example: echo "What is a prime number?" | redline chat Qwen/Qwen3-0.6B
    Example: redline chat --server http://127.0.0.1:8000
    """
    from redline.chat.conversation import Conversation

    # A saved conversation is read first, so that an error in its file appears before the model is read, which may
    # take minutes.
    conversation = Conversation() if load is None else Conversation.load(load)
    if system is not None:
        conversation.system = system
    if server is None and model is None:
        raise RedlineError("give a MODEL (a folder, or OWNER/NAME in the Hugging Face cache), or --server URL.")
    local: dict[str, Any] = {"device": device, "precision": precision, "plan": plan, "strict": strict}
    if server is not None:
        _refuse_local(local)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"repetition_penalty": repetition_penalty, "seed": seed}
    options: Any = {name: value for name, value in given.items() if value is not None}
    # The server is asked for the model before stdin is read. If the user wrote the question in the place of MODEL, this
    # reports the error at once, instead of waiting for a question on stdin.
    answerer = None if server is None else _of_server(server, model, options, api_key_file)
    if question is not None and _has_piped_text():
        note("the text on stdin is ignored, because a QUESTION is given.", "yellow")
    if question is None and not (sys.stdin is not None and sys.stdin.isatty()):
        question = _read_stdin()
    if question is not None and not question.strip():
        raise RedlineError("the question is empty.")
    answerer = answerer or _of_machine(model or "", options, local)
    if question is not None:
        _answer_once(answerer, conversation, question.strip())
    else:
        _converse(answerer, conversation)


def _refuse_local(settings: dict[str, Any]) -> None:
    defaults = {"device": "auto", "precision": "auto", "plan": None, "strict": False}
    names = [f"--{name}" for name, value in settings.items() if value != defaults[name]]
    if names:
        raise RedlineError(
            f"with --server, leave out {', '.join(names)}: only a model of this machine uses such options."
        )


def _of_server(url: str, model: str | None, options: AnswerOptions, api_key_file: Path | None) -> ChatModel:
    from redline.chat.server_model import ServerModel

    return ServerModel(url, None if model in (None, "-") else model, options, read_api_key(api_key_file))


def _of_machine(model: str, options: AnswerOptions, settings: dict[str, Any]) -> ChatModel:
    with uninterrupted_imports():
        from redline.chat.local_model import LocalModel
    found = LocalModel(model, options, **settings)
    with warnings_as_sentences(), LiveLine("reading the model …"):
        found.load()
    return found


def _has_piped_text() -> bool:
    """Returns whether stdin is a file or a pipe with text in it, without reading it and without waiting for it."""
    try:
        handle = sys.stdin.fileno()
        kind = os.fstat(handle)
        if stat.S_ISREG(kind.st_mode):
            return kind.st_size > os.lseek(handle, 0, os.SEEK_CUR)
        return stat.S_ISFIFO(kind.st_mode) and _waiting(handle) > 0
    except (AttributeError, ImportError, OSError, ValueError):
        # There is no stdin, stdin is not a file of the system, or the system cannot say how much text is waiting.
        return False


def _waiting(handle: int) -> int:
    """Returns the number of bytes in a pipe."""
    import fcntl
    import termios

    return int.from_bytes(fcntl.ioctl(handle, termios.FIONREAD, bytes(4)), sys.byteorder)


def _read_stdin() -> str:
    with suppress(AttributeError):
        sys.stdin.reconfigure(encoding="utf-8")  # pyrefly: ignore[missing-attribute]
    try:
        return sys.stdin.read() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise RedlineError("the question on stdin is not UTF-8 text.") from error


def _answer_once(model: ChatModel, conversation: Conversation, question: str) -> None:
    """Prints the answer alone, so that other programs can read it."""
    from redline.chat.model import LENGTH_OR_CONTEXT, Answer
    from redline.chat.session import printable

    conversation.add("user", question)
    answer, is_terminal = Answer(model.answer(conversation.with_system())), sys.stdout.isatty()
    try:
        for piece in answer:
            _write(printable(piece) if is_terminal else piece)
    except KeyboardInterrupt:
        _write("\n" if answer.text else "")
        raise typer.Exit(130) from None
    except RedlineError:
        # Ends the line of the answer, so that the error message starts on a new line.
        _write("\n" if answer.text else "")
        raise
    _write("\n")
    if answer.ending.reason in ("length", "context", LENGTH_OR_CONTEXT):
        note("the answer was cut: give a larger --max-tokens, or begin a new conversation if the context is full.")


def _converse(model: ChatModel, conversation: Conversation) -> None:
    from redline.chat.session import ChatSession

    with suppress(ImportError):
        # Importing it lets `input` edit lines and recall earlier ones.
        import readline  # noqa: F401
    note(f"{model.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")
    handler = signal.getsignal(signal.SIGTERM)
    is_terminated = lambda: isinstance(handler, Termination) and handler.requested  # noqa: E731
    ChatSession(model, conversation, _write, note, fail, is_terminated).run(_read_line)


def _read_line(prompt: str) -> str:
    try:
        if sys.stdout.isatty():
            return input(prompt)
        # `input` would write the prompt into the file or pipe that gets the answers.
        progress.print(prompt, end="")
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        fail("this line is not UTF-8 text.")
        return ""
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
