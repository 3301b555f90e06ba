"""`redline chat`: with a model of this machine, with a server, in pipes and at a terminal."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from serving.fake_server import Answer, FakeServer

from ..generation.tiny_language_model import write_model
from .conftest import Seen
from .test_bad_input import assert_one_sentence

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "tiny"


def test_a_question_is_answered_as_text_generator_does(
    folder: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline import TextGenerator

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the sea?"}]
    expected = TextGenerator(folder, device="cpu").chat(messages, max_tokens=12, temperature=0.8, seed=3)
    options = ("--device", "cpu", "--max-tokens", 12, "--temperature", 0.8, "--seed", 3, "--system", "be brief")
    seen = command("chat", folder, "the sea?", *options)
    assert (seen.code, seen.out) == (0, f"{expected}\n")
    assert "--max-tokens" in seen.err, "the answer was cut"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the sea?\n"), encoding="latin-1"))
    assert command("chat", folder, *options).out == f"{expected}\n"


def test_bad_input_is_one_sentence(
    folder: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (folder / "chat_template.jinja").unlink()
    assert_one_sentence(command("chat", folder, "Q", "--device", "cpu"), "has no chat template, so it cannot chat: use")
    assert_one_sentence(command("chat", tmp_path / "none", "Q"), "none")
    assert_one_sentence(command("chat", "--server", "127.0.0.1:1", "-", "Q"), "cannot reach http://127.0.0.1:1")
    assert_one_sentence(command("chat", folder, "Q", "--load", "none.json"), "cannot read the conversation")
    assert_one_sentence(command("chat", folder, "  "), "the question is empty")
    for text, words in ((b"", "the question is empty"), (b"\xff", "not UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        assert_one_sentence(command("chat", folder), words)
        assert_one_sentence(command("chat"), "give a MODEL")
    for options in (("--device", "cpu"), ("--precision", "bf16"), ("--plan", "bf16"), ("--strict",)):
        assert_one_sentence(command("chat", "--server", "127.0.0.1:1", *options), f"leave out {options[0]}: only")
    both = command("chat", "--server", "127.0.0.1:1", "--device", "cpu", "--plan", "bf16")
    assert_one_sentence(both, "leave out --device, --plan")


def test_a_question_in_the_place_of_the_model_is_an_error(
    command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with FakeServer(models=("tiny", "small")).in_thread() as server:
        seen = command("chat", "--server", server.url, "What is a prime number?")
        assert_one_sentence(seen, "it lists 'tiny', 'small'. A question needs a model or - before it")
        assert command("chat", "--server", server.url, "small", "Q").code == 0
        assert [body["model"] for body in server.seen] == ["small"]


def test_text_on_stdin_beside_a_question_is_said_to_be_ignored(
    command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("text")
    with FakeServer().in_thread() as server:
        for text in (b"text", b""):
            ours, theirs = os.pipe()
            os.write(theirs, text)
            with open(ours, encoding="utf-8") as pipe, open(theirs, "wb"):
                monkeypatch.setattr(sys, "stdin", pipe)
                seen = command("chat", "--server", server.url, "-", "Q")
            assert (seen.code, seen.out) == (0, "Hello there\n")
            assert ("the text on stdin is ignored" in seen.err) == bool(text)
        with open(tmp_path / "text.txt", encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert "the text on stdin is ignored" in command("chat", "--server", server.url, "-", "Q").err


def test_a_server_answers_in_a_pipe(command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_API_KEY", "the key")
    Path("chat.json").write_text(json.dumps([{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]))
    with FakeServer(lambda _: Answer(("\x1b[1mbold", "\n")), key="the key").in_thread() as server:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"), encoding="utf-8"))
        seen = command("chat", "--server", server.url, "--load", "chat.json", "--top-k", 5)
        assert (seen.code, seen.out, seen.err) == (0, "\x1b[1mbold\n\n", "")
        assert [message["content"] for message in server.seen[0]["messages"]] == ["A", "B", "one\ntwo"]
        assert server.seen[0]["top_k"] == 5 and "max_tokens" not in server.seen[0]


class Terminal:
    """A chat at a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "redline", "chat", *map(str, arguments)]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        os.close(theirs)
        self.shown = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Waits until the terminal shows a text after what the last call waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in self.shown:
            assert time.monotonic() < deadline, self.shown
            self.shown += os.read(self._ours, 65_536)
        self.shown = self.shown.partition(text.encode())[2]


def test_a_chat_at_a_terminal() -> None:
    def answer(body: dict[str, Any]) -> Answer:
        return Answer(("word ",) * 1000, gap_s=0.02) if len(server.seen) == 1 else Answer(("Whole", " answer"))

    server = FakeServer(answer)
    with server.in_thread(), Terminal("--server", server.url) as terminal:
        terminal.wait_for("tiny: /help lists the commands")
        terminal.wait_for("> ")
        terminal.write("First \\\nquestion\n")
        terminal.wait_for("word word")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.write("Second\n")
        terminal.wait_for("Whole answer")
        terminal.wait_for("2 tokens")
        terminal.wait_for("> ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("Ctrl-D or /exit ends the chat")
        terminal.write("/exit\n")
        assert terminal.process.wait(PATIENCE_S) == 0
    first, second = server.seen
    assert first["messages"][0]["content"] == "First \nquestion"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"].startswith("word word") and server.disconnects == 1


def test_sigterm_ends_a_chat_in_an_answer() -> None:
    server = FakeServer(lambda _: Answer(("word ",) * 1000, gap_s=0.02))
    with server.in_thread(), Terminal("--server", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.write("Question\n")
        terminal.wait_for("word word")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.wait_for("terminated.")
        assert terminal.process.wait(PATIENCE_S) == 143
