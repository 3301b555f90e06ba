"""The parts of the server that need no server: stop strings, keys, admission, tool calls, token texts."""

import random
from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.serving.admission import Admission
from redline.serving.api_requests import Function, Tool
from redline.serving.errors import ApiError
from redline.serving.keys import ANYONE, Caller, Keys, read_keys
from redline.serving.limits import Limits
from redline.serving.sampling_fields import SamplingDefaults
from redline.serving.stop_strings import StopStrings
from redline.serving.token_texts import TokenTexts
from redline.serving.tools import ToolChoice
from serving.fake_engine import write_folder

KEY = "a-long-enough-key"


def test_stop_strings_agree_with_a_search_of_the_whole_text() -> None:
    draw = random.Random(3)
    for _ in range(400):
        text = "".join(draw.choices("ab", k=draw.randrange(12)))
        stops = tuple({"".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(draw.randrange(3))})
        finder, shown, place = StopStrings(stops), "", 0
        while place < len(text) and finder.found is None:
            size = draw.randrange(1, 4)
            shown += finder.push(text[place : place + size])
            place += size
        shown += finder.finish() if finder.found is None else ""
        ends = [found for stop in stops if (found := text.find(stop)) >= 0]
        assert shown == (text[: min(ends)] if ends else text), (text, stops)


def test_nothing_is_held_back_that_cannot_begin_a_stop_string() -> None:
    finder = StopStrings(("</end>",))
    assert [finder.push(piece) for piece in ("a <", "/e", "x<", "b")] == ["a ", "", "</ex", "<b"]


def tools(tagged: bool, forced: bool = False) -> Any:
    tool = Tool(Function("f", parameters={"type": "object"}))
    reader = ToolChoice((tool,), (tool,) if forced else (), tagged).reader()
    assert reader is not None
    return reader


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("tagged", "text", "content", "arguments"),
    [
        (True, 'Hi <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "Hi ", ['{"x": 1}']),
        (True, '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>', "", ["{}", "{}"]),
        (True, '<tool_call>{"name": "f"}', "", ["{}"]),
        (True, "<tool_call>{nonsense</tool_call> x", "<tool_call>{nonsense</tool_call> x", []),
        (True, '<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>', []),
        (True, "a < b <tool", "a < b <tool", []),
        (False, ' {"name": "f", "parameters": {"x": 1}}', "", ['{"x": 1}']),
        (False, '{"answer": 42}', '{"answer": 42}', []),
        (False, "The {", "The {", []),
    ],
)
def test_tool_calls_are_found_however_the_text_is_cut(
    tagged: bool, text: str, content: str, arguments: list[str], size: int
) -> None:
    reader, shown, calls = tools(tagged), "", []
    for place in range(0, len(text), size):
        new, found = reader.push(text[place : place + size], place + size >= len(text))
        shown, calls = shown + new, calls + found
    assert (shown, [call.function.arguments for call in calls]) == (content, arguments)
    assert [call.index for call in calls] == list(range(len(calls)))


def test_tokens_of_half_a_character_have_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_folder(tmp_path) / "tokenizer.json"))
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode("é</s>").ids
    assert b"".join(map(texts.bytes_of, tokens)).decode() == "é</s>" and texts.text_of(tokens[0]) == "\ufffd"


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\nalice = {KEY}-1\n{KEY}-2\n")
    monkeypatch.setenv("REDLINE_API_KEYS", f"{KEY}-3, {KEY}-4")
    keys = read_keys(f"{KEY}-0", file)
    names = [caller.name if (caller := keys.find(f"{KEY}-{number}")) else None for number in range(6)]
    assert names == ["key", "alice", "line-4", "environment-1", "environment-2", None]
    assert keys.find(None) is keys.find("") is None and keys.find("\udcff") is None
    assert len({keys.callers[digest].salt for digest in keys.callers}) == 5
    assert KEY not in repr(keys) and Keys().find(None) is ANYONE


@pytest.mark.parametrize(
    ("text", "message"),
    [("short", "at least 12"), ("a b", "line 1: write one key"), ("# none", "no key"), (f"a={KEY}\na={KEY}x", "twice")],
)
def test_bad_key_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RedlineError, match=message):
        read_keys(file=tmp_path / "keys")


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    now_s = [0.0]
    admission = Admission(Limits(queue_requests=2, queue_tokens=10), lambda: now_s[0])
    first, second = admission.admit(ANYONE), admission.admit(ANYONE)
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYONE)
    assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "1"}
    first.queue(8)
    with pytest.raises(ApiError, match="prompt tokens are waiting"):
        second.queue(3)
    now_s[0] = 100.0
    first.first_token()
    second.queue(99)  # a prompt longer than the queue is taken when nothing else waits
    assert (admission.waiting, admission.waiting_tokens, admission.running) == (1, 99, 2)
    assert admission.retry_after_s == 10
    for ticket in (first, second, second):
        ticket.close()
    assert (admission.waiting, admission.waiting_tokens, admission.running) == (0, 0, 0)


def test_rate_and_concurrency_are_per_key() -> None:
    now_s = [0.0]
    admission = Admission(Limits(rate_per_minute=2, concurrency=1), lambda: now_s[0])
    alice, bob = Caller("alice", "a"), Caller("bob", "b")
    ticket = admission.admit(alice)
    with pytest.raises(ApiError, match="already has 1 request"):
        admission.admit(alice)
    admission.admit(bob)
    ticket.close()
    admission.admit(alice).close()
    with pytest.raises(ApiError, match="2 requests a minute") as refused:
        admission.admit(alice)
    assert refused.value.retry_after_s == 30
    now_s[0] = 30.0
    admission.admit(alice).close()


def test_defaults_of_the_model_are_used_if_they_are_valid() -> None:
    assert SamplingDefaults.of({"temperature": 0.6, "top_k": 20}).values == {"temperature": 0.6, "top_k": 20}
    assert SamplingDefaults.of({"do_sample": False}).values == {"temperature": 0.0}
    assert SamplingDefaults.of({"temperature": -3}).values == {"temperature": 1.0}
    assert SamplingDefaults.of({}).values == {"temperature": 1.0}


def test_limits_must_be_positive() -> None:
    with pytest.raises(RedlineError, match="queue_requests must not be 0"):
        Limits(queue_requests=0)
