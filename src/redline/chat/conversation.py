"""The messages of a conversation, and the file that keeps them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.untrusted import read_json

_ROLES = ("system", "user", "assistant")
Message = dict[str, str]


@dataclass
class Conversation:
    """`messages` are in OpenAI's form, without the system prompt, which is kept apart."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def with_system(self) -> list[Message]:
        """Returns all messages for a model."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def add(self, role: str, content: str) -> None:
        # Half of a surrogate pair, which a server may send and a terminal may pass on, is not text.
        self.messages.append({"role": role, "content": content.encode("utf-8", "replace").decode()})

    def take_question(self) -> str | None:
        """Removes the last question with its answer and returns it; None if there is no question."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def save(self, path: Path, model: str) -> None:
        """Writes the conversation as JSON; the file is replaced in one step. Does not create its folder."""
        if not path.parent.is_dir():
            raise RedlineError(f"cannot write {str(path)!r}: {str(path.parent)!r} is not an existing folder.")
        document = {"model": model, "messages": self.with_system()}
        write_text(path, json.dumps(document, ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Reads `{"messages": [...]}` or a list of messages; tools and images are not supported."""
        document = read_json(path, "conversation")
        entries = document.get("messages") if isinstance(document, dict) else document
        if not isinstance(entries, list):
            raise RedlineError(f'{str(path)!r} is not a conversation: it has no list "messages".')
        messages = [_message(entry, f"{str(path)!r}, message {number}") for number, entry in enumerate(entries, 1)]
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        return cls(system, messages)


def _message(entry: Any, where: str) -> Message:
    role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
    if role not in _ROLES:
        raise RedlineError(f"{where}: the role must be one of {', '.join(_ROLES)}, not {str(role)[:40]!r}.")
    if not isinstance(content, str):
        raise RedlineError(f"{where}: the content must be a text.")
    return {"role": role, "content": content}
