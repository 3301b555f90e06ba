"""Answers of an OpenAI-compatible server, and a sentence for each way in which it can fail."""

import socket
import threading
from collections.abc import Iterator

import pytest

from redline.chat.model import LENGTH_OR_CONTEXT, AnswerOptions, Ending
from redline.chat.model import Answer as ModelAnswer
from redline.chat.server_model import ServerModel
from redline.errors import RedlineError
from serving.fake_server import Answer, FakeServer

QUESTION = [{"role": "user", "content": "Q"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(models=("first", "second")).in_thread() as running:
        yield running


def ask(server: FakeServer, answer: Answer, max_tokens: int | None = None) -> tuple[list[str], Ending]:
    server.answer = lambda _: answer
    options: AnswerOptions = {"seed": 7} if max_tokens is None else {"seed": 7, "max_tokens": max_tokens}
    found = ModelAnswer(ServerModel(server.url, None, options, None).answer(QUESTION))
    return list(found), found.ending


def test_an_answer_streams(server: FakeServer) -> None:
    pieces, ending = ask(server, Answer(("Hel", "lo ", "🙂"), gap_s=0.01, finish="length"))
    assert pieces == ["Hel", "lo ", "🙂"] and ending == Ending(3, LENGTH_OR_CONTEXT)
    body = server.seen[-1]
    assert body["model"] == "first" and body["messages"] == QUESTION and body["seed"] == 7 and body["stream"] is True
    assert "temperature" not in body
    assert ask(server, Answer(("a",), usage=False))[1] == Ending(None, "stop")


def test_a_cut_may_be_due_to_the_context(server: FakeServer) -> None:
    cut = Answer(("a", "b"), finish="length")
    assert ask(server, cut, max_tokens=2)[1].reason == "length"
    assert ask(server, cut, max_tokens=3)[1].reason == LENGTH_OR_CONTEXT
    assert ask(server, Answer(("a",), finish="length", usage=False), max_tokens=1)[1].reason == LENGTH_OR_CONTEXT


def test_a_model_that_the_server_does_not_list_is_an_error(server: FakeServer) -> None:
    with pytest.raises(RedlineError, match="has no model 'What is it.': it lists 'first', 'second'. A question needs"):
        ServerModel(server.url, "What is it?", {}, None)


def test_leaving_early_closes_the_connection(server: FakeServer) -> None:
    server.answer = lambda _: Answer(("a",) * 500, gap_s=0.01)
    before = server.disconnects
    pieces = ServerModel(f"{server.url}/v1/", "second", {}, None).answer(QUESTION)
    assert next(pieces) == "a" and server.seen[-1]["model"] == "second"
    pieces.close()
    for _ in range(1000):
        if server.disconnects > before:
            break
        threading.Event().wait(0.01)
    assert server.disconnects == before + 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(status=429, message="full.", headers={"Retry-After": "3"}), "busy .429: full.: try again in 3 s"),
        (Answer(status=503, message="draining"), "is not ready .503: draining.: try again in a moment"),
        (Answer(status=400, message="the context is full"), "answers 400: the context is full"),
        (Answer(("a",), gap_s=0.05, cut=True), "was lost before the answer was complete"),
        (Answer(("a",), error="the engine ended"), "reports an error: the engine ended"),
    ],
)  # fmt: skip
def test_errors_are_sentences(server: FakeServer, answer: Answer, words: str) -> None:
    with pytest.raises(RedlineError, match=words) as error:
        ask(server, answer)
    assert str(error.value).endswith(".") and not str(error.value).endswith("..")


def test_a_key_is_sent_and_asked_for(server: FakeServer) -> None:
    server.key = "the key"
    try:
        with pytest.raises(RedlineError, match="REDLINE_API_KEY"):
            ServerModel(server.url, None, {}, None)
        server.answer = lambda _: Answer()
        assert list(ServerModel(server.url, None, {}, "the key").answer(QUESTION)) == ["Hello", " there"]
    finally:
        server.key = None


def test_a_server_that_is_not_there_or_not_one() -> None:
    with pytest.raises(RedlineError, match="cannot reach http://127.0.0.1:1: connection refused"):
        ServerModel("127.0.0.1:1", None, {}, None)
    replies = [
        (b"nonsense\r\n\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>", "does not answer with JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{\"data\":[]}", "lists no model"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers 404"),
    ]  # fmt: skip
    for reply, words in replies:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(reply: bytes = reply, listener: socket.socket = listener) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(reply)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(RedlineError, match=words):
                ServerModel(f"http://127.0.0.1:{listener.getsockname()[1]}", None, {}, None)
            thread.join()


def test_a_whole_answer_without_a_stream() -> None:
    body = b'{"choices": [{"message": {"content": "All of it"}, "finish_reason": "stop"}]}'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            # A server without a list of models gets the name as it was given.
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        model = ServerModel(f"http://127.0.0.1:{listener.getsockname()[1]}", "m", {}, None)
        assert list(model.answer(QUESTION)) == ["All of it"]
        thread.join()
