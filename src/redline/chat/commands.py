"""What the user writes: questions of one or several lines, and commands that begin with a slash."""

from collections.abc import Callable
from dataclasses import dataclass

# The argument of each command, and what it does.
COMMANDS = {
    "/system": ("TEXT", "sets the system prompt, - removes it; without TEXT, shows it"),
    "/retry": ("", "asks the last question again"),
    "/history": ("", "shows the conversation"),
    "/clear": ("", "begins a new conversation with the same system prompt"),
    "/save": ("FILE", "writes the conversation as JSON"),
    "/load": ("FILE", "continues a saved conversation"),
    "/help": ("", "shows this help"),
    "/exit": ("", "ends the chat, and so does Ctrl-D"),
}
_ALIASES = {"/quit": "/exit", "/?": "/help"}
_QUOTES = '"""'
HELP = "\n".join(
    [
        *(f"{f'{name} {argument}':12} {text}" for name, (argument, text) in COMMANDS.items()),
        f"A line that ends with \\ continues on the next one; {_QUOTES} begins and ends a text of several lines.",
        "A space before the slash sends a text that begins with one. Ctrl-C stops an answer.",
    ]
)


@dataclass(frozen=True)
class Entry:
    """A question (`command` is empty), or a command with its argument."""

    command: str
    text: str


def read_entry(read_line: Callable[[str], str]) -> Entry:
    """Reads lines until an entry is complete. `read_line` gets the prompt to show, and may raise EOFError."""
    line = read_line("> ")
    if line.startswith("/"):
        name, _, argument = line.partition(" ")
        return Entry(_ALIASES.get(name, name), argument.strip())
    if line.lstrip().startswith(_QUOTES):
        return Entry("", _read_quoted(line.lstrip().removeprefix(_QUOTES), read_line))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line("… "))
    return Entry("", "\n".join(lines).strip())


def _read_quoted(first: str, read_line: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(read_line("… "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip()
