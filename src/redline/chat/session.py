"""A chat at the terminal: reads entries, streams answers, runs commands."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from redline.chat.commands import COMMANDS, HELP, read_entry
from redline.chat.conversation import Conversation
from redline.chat.model import LENGTH_OR_CONTEXT, Answer, ChatModel
from redline.errors import RedlineError
from redline.notation import format_seconds

# Control characters of an answer could move the cursor or change the terminal's settings.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_ENDS = {
    "length": "cut at the longest length",
    "context": "the context is full",
    LENGTH_OR_CONTEXT: "cut at the longest length, or because the context is full: /clear begins a new conversation",
}


def printable(text: str) -> str:
    """Removes the control characters that a terminal would obey, except tabs and new lines."""
    return _CONTROL.sub("", text)


@dataclass
class ChatSession:
    """`write` prints a piece of an answer, `note` a line about it, and `fail` an error.

    `is_terminated` tells SIGTERM from Ctrl-C, because both raise KeyboardInterrupt.
    """

    model: ChatModel
    conversation: Conversation
    write: Callable[[str], None]
    note: Callable[[str], None]
    fail: Callable[[str], None]
    is_terminated: Callable[[], bool] = lambda: False
    # The question that got no answer, for /retry.
    _unanswered: str | None = field(default=None, init=False)

    def run(self, read_line: Callable[[str], str]) -> None:
        """Reads and answers until the user leaves; two Ctrl-C in a row at the prompt leave as well."""
        interrupts = 0
        while True:
            try:
                entry = read_entry(read_line)
            except EOFError:
                self.write("\n")
                return
            except KeyboardInterrupt:
                self.write("\n")
                interrupts += 1
                if interrupts > 1 or self.is_terminated():
                    raise
                self.note("Ctrl-D or /exit ends the chat, and so does another Ctrl-C.")
                continue
            interrupts = 0
            if entry.command == "/exit":
                return
            try:
                if entry.command:
                    self._obey(entry.command, entry.text)
                elif entry.text:
                    self.ask(entry.text)
            except RedlineError as error:
                self.fail(str(error))

    def ask(self, question: str) -> None:
        """Streams the answer to a question. Ctrl-C stops it; what was written stays in the conversation."""
        self.conversation.add("user", question)
        self._unanswered = None
        answer = Answer(self.model.answer(self.conversation.with_system()))
        is_stopped = False
        try:
            for piece in answer:
                self.write(printable(piece))
        except KeyboardInterrupt:
            if self.is_terminated():
                raise
            is_stopped = True
        finally:
            if answer.text:
                self.conversation.add("assistant", answer.text)
                self.write("\n")
            else:
                # Chat templates want questions and answers in turns.
                self._unanswered = self.conversation.take_question()
        self.note(_describe(answer, is_stopped))

    def _obey(self, command: str, argument: str) -> None:
        match command:
            case "/help":
                self.note(HELP)
            case "/system":
                self._set_system(argument)
            case "/retry":
                self._retry()
            case "/history":
                for message in self.conversation.with_system():
                    self.note(f"{message['role']}: {printable(message['content'])}")
            case "/clear":
                self.conversation.messages.clear()
                self._unanswered = None
                kept = " with the same system prompt" if self.conversation.system else ""
                self.note(f"a new conversation{kept}.")
            case "/save":
                path = _path(command, argument)
                self.conversation.save(path, self.model.name)
                self.note(f"wrote {path}")
            case "/load":
                self.conversation = Conversation.load(_path(command, argument))
                self._unanswered = None
                self.note(f"{len(self.conversation.messages):,} messages.")
            case _:
                raise RedlineError(f"unknown command {command!r}: use one of {', '.join(COMMANDS)}.")

    def _set_system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text.encode("utf-8", "replace").decode()
        self.note(f"system prompt: {printable(self.conversation.system) or 'none'}")

    def _retry(self) -> None:
        question = self._unanswered if self._unanswered is not None else self.conversation.take_question()
        if question is None:
            raise RedlineError("there is no question to ask again.")
        self.ask(question)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise RedlineError(f"{command} needs a file: {command} chat.json.")
    return Path(argument).expanduser()


def _describe(answer: Answer, is_stopped: bool) -> str:
    parts = []
    if answer.ending.tokens is not None:
        parts.append(f"{answer.ending.tokens:,} token{'s' if answer.ending.tokens != 1 else ''}")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.3g} tokens/s")
    if answer.first_s is not None:
        parts.append(f"first after {format_seconds(answer.first_s)}")
    parts += ["stopped"] if is_stopped else []
    parts += [_ENDS[answer.ending.reason]] if answer.ending.reason in _ENDS else []
    return " · ".join(parts) or "no answer"
