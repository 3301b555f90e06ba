"""The file of a conversation: OpenAI's messages as JSON, written whole or not at all."""

import json
from pathlib import Path

import pytest

from redline.chat.conversation import Conversation
from redline.errors import RedlineError


def test_a_conversation_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for system in ("", "Be brief."):
        for text in ("Ünïcode 🙂\n\n```\nx\n```", "a lone surrogate \ud83d"):
            conversation = Conversation(system)
            conversation.add("user", text)
            conversation.add("assistant", "Yes")
            assert "\ud83d" not in conversation.messages[0]["content"]
            conversation.save(path, "tiny")
            assert Conversation.load(path) == conversation
            document = json.loads(path.read_text())
            assert document["model"] == "tiny" and document["messages"] == conversation.with_system()
    assert list(path.parent.iterdir()) == [path]
    path.write_text(json.dumps([{"role": "user", "content": "Q", "name": "x"}]))
    assert Conversation.load(path) == Conversation("", [{"role": "user", "content": "Q"}])


def test_a_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="cannot write .* is not an existing folder"):
        Conversation().save(tmp_path / "new" / "chat.json", "tiny")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a readable conversation"),
        ("[1, 2]", "message 1: the role must be one of system, user, assistant"),
        ("{}", 'it has no list "messages"'),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "not 'tool'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "the content must be a text"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_unreadable_files_raise(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    with pytest.raises(RedlineError, match=words):
        Conversation.load(path)
