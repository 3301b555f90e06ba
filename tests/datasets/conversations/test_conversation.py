"""Conversations: the same for the same seed everywhere, varied, well formed, and without held-out combinations."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from redline.datasets.conversations import ASKED, Draw, conversation, question
from redline.datasets.conversations.scene import HELD_OUT_EVERY, is_held_out
from redline.datasets.conversations.topics import TOPICS, WEIGHTS

MANY = 1500
DIGEST = """
import hashlib, json
from redline.datasets.conversations import ASKED, Draw, conversation, question
made = [conversation(Draw(3, "training", row)) for row in range(40)]
made += [question(topic, 1).messages for topic in ASKED]
print(hashlib.sha256(json.dumps(made).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def many() -> list[list[dict[str, str]]]:
    return [conversation(Draw(0, "training", row)) for row in range(MANY)]


def test_the_same_seed_gives_the_same_conversations_in_another_process() -> None:
    made = [conversation(Draw(3, "training", row)) for row in range(40)]
    made += [question(topic, 1).messages for topic in ASKED]
    # Sets of strings have another order in a process with another hash seed.
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == hashlib.sha256(json.dumps(made).encode()).hexdigest()
    assert conversation(Draw(4, "training", 0)) != conversation(Draw(3, "training", 0))
    assert conversation(Draw(3, "tokenizer", 0)) != conversation(Draw(3, "training", 0))


def test_conversations_are_well_formed(many: list[list[dict[str, str]]]) -> None:
    for messages in many:
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns and turns == ["user", "assistant"] * (len(turns) // 2)
        for message in messages:
            assert message["content"] == message["content"].strip() != ""
            assert not re.search(r"\{\w*\}|<\|| {2}|None|\(\(", message["content"]), message
            assert message["content"].encode("utf-8")
    share = sum(messages[0]["role"] == "system" for messages in many) / MANY
    assert 0.2 < share < 0.5


def test_conversations_are_varied(many: list[list[dict[str, str]]]) -> None:
    texts = {json.dumps(messages) for messages in many}
    assert len(texts) > 0.98 * MANY
    for topic in ("arithmetic", "comparing", "spelling", "reasoning", "stories", "memory", "unknown"):
        drawn = {TOPICS[topic](Draw(0, topic, number)).turns[0] for number in range(300)}
        assert len(drawn) > 220, topic
    assert set(WEIGHTS) | {"system"} == set(TOPICS) == {*ASKED, "small talk", "untold"}


def test_training_never_contains_what_is_held_out(many: list[list[dict[str, str]]]) -> None:
    pairs = set()
    for messages in many:
        for message in messages:
            if message["role"] == "user":
                sums = re.findall(r"\d+(?: ?\+ ?\d+)+", message["content"])
                pairs |= {tuple(re.findall(r"\d+", one)) for one in sums if one.count("+") == 1}
    keys = {f"{min(a, b)} + {max(a, b)}" for a, b in (map(int, pair) for pair in pairs) if max(a, b) > 20}
    assert len(keys) > 50 and not any(map(is_held_out, keys))
    # The check can fail: as many sums are drawn before the held-out ones are left out.
    drawn = [TOPICS["arithmetic"](Draw(0, "any", number)) for number in range(1000)]
    share = sum(scene.is_held_out for scene in drawn) / len(drawn)
    assert 0.3 / HELD_OUT_EVERY < share < 3 / HELD_OUT_EVERY


@pytest.mark.parametrize("topic", ASKED)
def test_every_topic_has_many_held_out_questions(topic: str) -> None:
    asked = [question(topic, number) for number in range(20)]
    assert asked == [question(topic, number) for number in range(20)]
    assert asked[0] != question(topic, 0, seed=1)
    assert len({json.dumps(one.messages) for one in asked}) > 5
    for one in asked:
        assert one.topic == topic and one.answer and one.messages[-1]["role"] == "user"
