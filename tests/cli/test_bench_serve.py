"""`redline bench serve` against a server in a thread: its table, its files, and its errors."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.fake_server import Answer, FakeServer

from .conftest import Seen, strict_json
from .test_bad_input import assert_one_sentence


@pytest.fixture
def server() -> Iterator[FakeServer]:
    def answer(body: dict[str, Any]) -> Answer:
        return Answer(status=429, message="busy") if len(fake.seen) == 12 else Answer(("a",) * 4, gap_s=0.001)

    fake = FakeServer(answer)
    with fake.in_thread():
        yield fake


def test_levels_are_printed_and_written(server: FakeServer, command: Callable[..., Seen], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("levels.jsonl", "requests.jsonl", "page.html")}
    options = ("--requests", 6, "--warmup", 2, "--input", "5-9", "--output", 4, "--limit", "ttft=30s")
    saved = ("--save", files["levels.jsonl"], "--save-requests", files["requests.jsonl"], "--page", files["page.html"])
    seen = command("bench", "serve", server.url + "/v1/", "--concurrency", "1,2", *options, *saved)
    assert seen.code == 0, seen.err
    one, two = seen.out.splitlines()[1:]
    assert one.startswith("1 client ") and two.startswith("2 clients ") and "5 done, 1 rejected" in two
    rows = [strict_json(line) for line in files["levels.jsonl"].read_text().splitlines()]
    assert [row["load"]["concurrency"] for row in rows] == [1, 2]
    assert [(row["done"], row["rejected"], row["good"]) for row in rows] == [(6, 0, 6), (5, 1, 5)]
    assert all(row["output_tokens"] == 4 * row["done"] and row["itl"]["count"] == 3 * row["done"] for row in rows)
    assert all(row["command"].startswith("redline bench serve") and row["machine"]["cores"] for row in rows)
    assert all(row["server"]["model"] == "tiny" and row["versions"]["redline"] for row in rows)
    requests = [json.loads(line) for line in files["requests.jsonl"].read_text().splitlines()]
    # Two requests to warm up are not measured, and no prompt is sent twice.
    assert [entry["number"] for entry in requests] == list(range(2, 14))
    assert len({body["prompt"] for body in server.seen}) == 14
    assert all(5 <= len(body["prompt"].split()) <= 9 and body["max_tokens"] == 4 for body in server.seen)
    assert {entry["status"] for entry in requests} == {"done", "rejected"} and requests[0]["due_s"] == 0
    page = files["page.html"].read_text()
    assert "TTFT by load" in page and "Requests running" in page and "429 busy" in page


def test_prompts_of_a_file_as_json(server: FakeServer, command: Callable[..., Seen], tmp_path: Path) -> None:
    lines = ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}, {"body": {"prompt": "The sea"}})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--dataset", "prompts.jsonl", "--output", 2, "--requests", 4, "--json")
    report = command("bench", "serve", server.url, "--rate", 1000, *options).json()
    assert [body["max_tokens"] for body in server.seen] == [3, 2, 3, 2]
    assert "ignore_eos" not in server.seen[0] and server.seen[0]["messages"][0]["content"] == "Hi"
    (level,) = report["levels"]
    assert level["done"] == 4 and level["load"]["rate"] == 1000 and level["goodput_per_s"] is None


def test_a_failed_request_is_exit_code_1(command: Callable[..., Seen]) -> None:
    with FakeServer(lambda _: Answer(status=500, message="out of order")).in_thread() as server:
        seen = command("bench", "serve", server.url, "--concurrency", 1, "--requests", 2)
    assert seen.code == 1 and "2 failed" in seen.out
    assert "2 requests failed; the most frequent error: 500 out of order." in seen.err


@pytest.mark.parametrize("options", [("--requests", 5), ("--duration", "300ms")])
def test_levels_of_several_processes_have_prompts_of_their_own(
    options: tuple[object, ...], command: Callable[..., Seen]
) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        # One of the two processes is faster, so it gets further in the same time.
        return Answer(("a",), first_s=0.03 if len(fake.seen) % 2 else 0.003)

    fake = FakeServer(answer)
    with fake.in_thread():
        arguments = ("--concurrency", "1,3,3", "--processes", 2, "--input", 30, *options, "--json")
        report = command("bench", "serve", fake.url, *arguments).json()
    done = [level["done"] for level in report["levels"]]
    assert done == [5, 5, 5] or "--duration" in options
    assert len({body["prompt"] for body in fake.seen}) == len(fake.seen) == sum(done)


def test_a_model_that_the_server_does_not_list_stops_the_run(server: FakeServer, command: Callable[..., Seen]) -> None:
    run = ("bench", "serve", server.url, "--concurrency", 1, "--requests", 1, "--model")
    assert_one_sentence(command(*run, "nope"), "has no model 'nope': it lists 'tiny'.")
    assert server.seen == [] and command(*run, "tiny").code == 0


def test_bad_input_is_one_sentence(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "messages": []}\n')
    (tmp_path / "none.jsonl").write_text("\n")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "give either --rate (requests per second) or --concurrency (clients)."),
        (("--rate", 1, "--concurrency", 2), ", not both."),
        (("--rate", "fast"), "not a list of numbers"),
        (("--rate", 0), "a rate must be above 0"),
        (("--concurrency", 0), "the concurrency must be from 1"),
        (("--rate", 1, "--burstiness", 0), "the burstiness must be above 0"),
        (("--rate", 1, "--input", "9-5"), "not a range of tokens"),
        (("--rate", 1, "--requests", 0), "at least 1"),
        (("--rate", 1, "--endpoint", "chats"), "unknown endpoint"),
        (("--rate", 1, "--dataset", "words.jsonl"), "unknown dataset"),
        (("--rate", 1, "--dataset", "bad.jsonl"), "bad.jsonl:1: a line must be an object"),
        (("--rate", 1, "--dataset", "none.jsonl"), "has no prompts"),
        (("--rate", 1, "--dataset", "bad.jsonl", "--prefix", 5), "--prefix is for random prompts"),
        (("--rate", 1, "--api-key-file", "nothing.txt"), "cannot read the API key"),
        (("--rate", 1, "--save", tmp_path), "it is a folder"),
        (("--rate", 1), "cannot reach http://127.0.0.1:1/v1/models: connection refused."),
    ]
    for options, words in cases:
        assert_one_sentence(command("bench", "serve", "127.0.0.1:1", *options), words)
    assert_one_sentence(command("bench", "serve", "ftp://here", "--rate", 1), "not the address of a server")
    with FakeServer(key="the key").in_thread() as server:
        assert_one_sentence(command("bench", "serve", server.url, "--rate", 1), "REDLINE_API_KEY")


def test_the_key_comes_from_the_environment_or_a_file(
    command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key.txt").write_text("the key\nmore\n")
    with FakeServer(key="the key").in_thread() as server:
        run = ("bench", "serve", server.url, "--concurrency", 1, "--requests", 1)
        assert command(*run, "--api-key-file", "key.txt").code == 0
        monkeypatch.setenv("REDLINE_API_KEY", "the key")
        seen = command(*run, "--json")
        assert seen.code == 0 and "the key" not in seen.out
