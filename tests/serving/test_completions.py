"""Text completions, embeddings, tokens, models, health and metrics."""

import base64
import struct
from typing import Any

import openai
import pytest

from redline.machine.version import VERSION
from redline.serving.server import Server
from serving.fake_engine import REPLY
from serving.plain_http import send

pytestmark = pytest.mark.usefixtures("no_errors_logged")
MODEL = "tiny"


def test_a_completion_has_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY.encode()[:16].decode(), "length")
    assert answer.object == "text_completion" and answer.usage and answer.usage.completion_tokens == 16


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    prompts = ["[[say ab]]", "[[say cd]]"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage and answer.usage.prompt_tokens == sum(map(len, prompts))
    texts = [""] * 4
    for chunk in client.completions.create(model=MODEL, prompt=prompts, n=2, stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["[[say ab]]ab"] * 2 + ["[[say cd]]cd"] * 2


def test_prompts_of_tokens(client: openai.OpenAI, server: Server) -> None:
    tokens = send(f"{server.url}/tokenize", {"prompt": "[[say hi]]"}).json["tokens"]
    for prompt in (tokens, [tokens]):
        assert client.completions.create(model=MODEL, prompt=prompt).choices[0].text == "hi"
    assert send(f"{server.url}/detokenize", {"tokens": tokens}).json == {"prompt": "[[say hi]]"}


def test_log_probabilities_and_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="[[say abc]]", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens == ["a", "b", "c"] and logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 3 and logprobs.top_logprobs
    assert logprobs.top_logprobs[0]["a"] == -0.5 and len(logprobs.top_logprobs[0]) == 2
    offsets = []
    options: dict[str, Any] = {"model": MODEL, "prompt": "[[say abc]]", "logprobs": 0, "max_tokens": 3}
    for chunk in client.completions.create(**options, stream=True):
        offsets += chunk.choices[0].logprobs.text_offset or [] if chunk.choices[0].logprobs else []
    assert offsets == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "[[say yz]]", "echo": True, "logprobs": 1, "max_tokens": 2}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    else:
        choices = client.completions.create(**options).choices
    values, offsets = list[Any](), list[int]()
    for choice in choices:
        assert choice.logprobs is None or choice.logprobs.text_offset is not None
        values += (choice.logprobs and choice.logprobs.token_logprobs) or []
        offsets += (choice.logprobs and choice.logprobs.text_offset) or []
    assert "".join(choice.text for choice in choices) == "[[say yz]]yz"
    assert values == [None, *[-2.0] * 9, -0.5, -0.5] and offsets == list(range(12))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": ["a"] * 30, "n": 3}, "n"),
    ],
)
def test_errors_name_the_field(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, **options)
    assert caught.value.param == param


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["abc", "de"], encoding_format="float")
    assert [len(entry.embedding) for entry in answer.data] == [3, 3]
    assert [entry.embedding[1] for entry in answer.data] == [3.0, 2.0] and answer.usage.prompt_tokens == 5
    packed = client.embeddings.create(model=MODEL, input="abc", encoding_format="base64").data[0].embedding
    assert isinstance(packed, str)
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == answer.data[0].embedding
    last = client.embeddings.create(model=MODEL, input="abc", extra_body={"pooling": "last"})
    assert last.data[0].embedding[2] == 0.5
    with pytest.raises(openai.BadRequestError, match="one size only"):
        client.embeddings.create(model=MODEL, input="abc", dimensions=2)


def test_models_and_version(client: openai.OpenAI, server: Server) -> None:
    assert [card.id for card in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("owner/other")
    assert send(f"{server.url}/version").json == {"version": VERSION}
    assert send(f"{server.url}/health").status == 200


def test_sessions_are_deleted(server: Server) -> None:
    answer = send(f"{server.url}/v1/sessions/known", method="DELETE")
    assert answer.json == {"id": "known", "object": "session", "deleted": True}
    for name in ("unknown", "%2e%2e"):
        assert send(f"{server.url}/v1/sessions/{name}", method="DELETE").code == "session_not_found"


def test_metrics_have_the_names_of_vllm(client: openai.OpenAI, server: Server) -> None:
    client.completions.create(model=MODEL, prompt="[[say ab]]")
    answer = send(f"{server.url}/metrics")
    text = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/plain")
    for name in (
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_sum",
        "request_queue_time_seconds_count",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ):
        assert f"redline:{name}{{" in text, name
    assert 'redline:request_success_total{finished_reason="stop",model_name="tiny"}' in text


def test_request_ids_are_echoed_unless_they_could_split_a_log(server: Server) -> None:
    assert send(f"{server.url}/version", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(send(f"{server.url}/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"]) == 32


def test_unknown_fields_are_reported_once(server: Server, logged: list[Any]) -> None:
    for _ in range(2):
        body = {"prompt": "[[say a]]", "new_field": 1, "temperature": None}
        assert send(f"{server.url}/v1/completions", body).status == 200
    assert [record.getMessage() for record in logged if "new_field" in record.getMessage()] == [
        "ignored the unknown field 'new_field' of a request; further ones are not logged"
    ]
