"""The terminal chat with a model that says what the test wants: entries, commands, interrupts, errors."""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest

from redline.chat.commands import COMMANDS, HELP, Entry, read_entry
from redline.chat.conversation import Conversation
from redline.chat.model import LENGTH_OR_CONTEXT, Ending
from redline.chat.session import ChatSession
from redline.errors import RedlineError

Script = Sequence[str | type[BaseException] | RedlineError]


class ScriptedModel:
    """Says the pieces of one script after the other; an exception among them is raised there."""

    name = "scripted"

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.seen: list[list[dict[str, str]]] = []

    def answer(self, messages: Sequence[dict[str, str]]) -> Generator[str, None, Ending]:
        self.seen.append(list(messages))
        script = self.scripts.pop(0)
        for piece in script:
            if not isinstance(piece, str):
                raise piece
            yield piece
        return Ending(len(script), "stop")


class Chat:
    """Runs a session over lines; an exception among them is raised instead of a line. The end is an EOFError."""

    def __init__(self, *scripts: Script, terminated: bool = False) -> None:
        self.model = ScriptedModel(*scripts)
        self.out, self.notes, self.errors, self.prompts = "", list[str](), list[str](), list[str]()
        self.session = ChatSession(
            self.model, Conversation(), self._write, self.notes.append, self.errors.append, lambda: terminated
        )

    def _write(self, text: str) -> None:
        self.out += text

    def run(self, *lines: str | type[BaseException]) -> "Chat":
        rest = iter(lines)

        def read_line(prompt: str) -> str:
            self.prompts.append(prompt)
            line = next(rest, EOFError)
            if isinstance(line, str):
                return line
            raise line

        self.session.run(read_line)
        return self

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.session.conversation.messages]


def test_a_conversation_keeps_its_messages() -> None:
    chat = Chat(["Hel", "lo"], ["Bye"]).run("Hi", "", "Leave", "/exit", "never read")
    assert chat.out == "Hello\nBye\n" and chat.errors == []
    assert chat.messages == [("user", "Hi"), ("assistant", "Hello"), ("user", "Leave"), ("assistant", "Bye")]
    assert [len(messages) for messages in chat.model.seen] == [1, 3]
    assert chat.notes[0].startswith("2 tokens · ") and "first after" in chat.notes[0]


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    chat = Chat(["Half an", KeyboardInterrupt, "never"], ["Whole"]).run("One", "Two")
    assert chat.out == "Half an\nWhole\n\n"
    assert chat.messages[1] == ("assistant", "Half an") and len(chat.messages) == 4
    assert chat.notes[0].endswith("stopped")


def test_two_ctrl_c_at_the_prompt_leave() -> None:
    chat = Chat(["A"])
    with pytest.raises(KeyboardInterrupt):
        chat.run(KeyboardInterrupt, "Q", KeyboardInterrupt, KeyboardInterrupt, "never read")
    assert chat.out == "\nA\n\n\n" and "Ctrl-D" in chat.notes[0]


def test_sigterm_ends_the_chat() -> None:
    for lines in ((KeyboardInterrupt,), ("Q",)):
        with pytest.raises(KeyboardInterrupt):
            Chat(["A", KeyboardInterrupt], terminated=True).run(*lines)


def test_a_question_without_an_answer_is_asked_again_by_retry() -> None:
    busy = RedlineError("the server is busy.")
    chat = Chat([busy], ["Now"], ["Again"], [KeyboardInterrupt], ["Later"])
    chat.run("Q", "/retry", "/retry", "R", "/retry")
    assert chat.errors == ["the server is busy."]
    assert chat.out == "Now\nAgain\nLater\n\n"
    assert chat.messages == [("user", "Q"), ("assistant", "Again"), ("user", "R"), ("assistant", "Later")]
    assert [messages[-1]["content"] for messages in chat.model.seen] == ["Q", "Q", "Q", "R", "R"]
    assert Chat().run("/retry").errors == ["there is no question to ask again."]


def test_an_error_in_the_middle_keeps_what_was_said() -> None:
    chat = Chat(["Half", RedlineError("lost.")]).run("Q")
    assert chat.out == "Half\n\n" and chat.errors == ["lost."] and chat.messages[-1] == ("assistant", "Half")


def test_commands(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = Chat(["A"], ["B"]).run("/system Be brief.", "Q", f"/save {path}", "/clear", "/system", "R", f"/load {path}")
    assert chat.model.seen[0][0] == {"role": "system", "content": "Be brief."}
    assert chat.model.seen[1] == [chat.model.seen[0][0], {"role": "user", "content": "R"}]
    assert chat.messages == [("user", "Q"), ("assistant", "A")] and "2 messages." in chat.notes
    assert chat.notes.count("system prompt: Be brief.") == 2 and f"wrote {path}" in chat.notes
    shown = Chat().run(f"/load {path}", "/history", "/system -", "/system", "/?").notes
    assert shown[1:4] == ["system: Be brief.", "user: Q", "assistant: A"]
    assert shown[4:6] == ["system prompt: none"] * 2 and all(name in shown[6] for name in COMMANDS)
    errors = Chat().run("/fly", "/save", f"/load {tmp_path / 'none.json'}", f"/save {path}/inside").errors
    assert errors[0].startswith("unknown command '/fly'") and errors[1] == "/save needs a file: /save chat.json."
    assert errors[2].startswith("cannot read the conversation") and errors[3].startswith("cannot write")


def test_help_has_the_argument_behind_its_command() -> None:
    assert "/save FILE   writes the conversation as JSON" in HELP.splitlines()


def test_clear_is_confirmed() -> None:
    chat = Chat(["A"]).run("Q", "/clear", "/system Be brief.", "/clear")
    assert chat.notes[1] == "a new conversation." and chat.messages == []
    assert chat.notes[3] == "a new conversation with the same system prompt."


def test_a_cut_by_a_server_names_both_reasons() -> None:
    chat = Chat(["A"])

    def answer(messages: Sequence[dict[str, str]]) -> Generator[str, None, Ending]:
        yield "A"
        return Ending(1, LENGTH_OR_CONTEXT)

    chat.model.answer = answer  # pyrefly: ignore[bad-assignment]
    assert "the context is full: /clear" in chat.run("Q").notes[0]


def test_control_characters_do_not_reach_the_terminal() -> None:
    chat = Chat(["a\x1b[2J\x07b\r", "\x9b1mc\td\né\x7f"]).run("Q")
    assert chat.out == "a[2Jb1mc\td\né\n\n"
    assert "\x1b" in chat.messages[1][1], "the conversation has the text itself"


def lines(*given: str) -> Callable[[str], str]:
    rest: Iterator[str] = iter(given)
    return lambda _: next(rest)


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        (["a \\", " b\\", "c"], Entry("", "a \n b\nc")),
        (['"""a', "", "  b", 'c"""'], Entry("", "a\n\n  b\nc")),
        (['"""one line"""'], Entry("", "one line")),
        (['  """', "/exit", '"""'], Entry("", "/exit")),
        (["/save  a b.json "], Entry("/save", "a b.json")),
        (["/quit"], Entry("/exit", "")),
        ([" /etc/hosts?"], Entry("", "/etc/hosts?")),
    ],
)
def test_entries_of_several_lines(given: list[str], entry: Entry) -> None:
    assert read_entry(lines(*given)) == entry


def test_ctrl_c_drops_an_unfinished_entry() -> None:
    chat = Chat(["A"]).run('"""begun', KeyboardInterrupt, "Q")
    assert chat.messages[0] == ("user", "Q") and chat.prompts == ["> ", "… ", "> ", "> "]
