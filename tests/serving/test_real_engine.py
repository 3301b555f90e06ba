"""The server with Redline's own engine and tiny models: the same texts as in Python, and sessions that survive."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import redline
from generation.tiny_language_model import byte_tokenizer, write_model
from redline.generation import Engine, Request
from redline.generation.text_generator import TextGenerator
from redline.models.memory import TitanConfig, TitanModel, save_memory_model
from redline.serving import BatchProcessor, Limits, Server
from redline.serving.model_engine import load_engine
from serving.plain_http import PATIENCE_S, send
from serving.test_security import check_malformed

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"
_TWELVE = range(12)
PROMPTS = ["the sea", "the land and the sea", "é", "the sea is the sea and the land is", "a"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "decoder"
    folder.mkdir()
    write_model(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Server]:
    with redline.serve(model, port=0, device="cpu", max_rows=8, blocks=64) as server:
        yield server


@pytest.fixture(scope="module")
def api(real: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    return [str(TextGenerator(model, device="cpu")(prompt, max_tokens=24)) for prompt in PROMPTS]


def test_texts_are_those_of_the_text_generator(api: openai.OpenAI, expected: list[str]) -> None:
    def complete(prompt: str) -> str:
        return api.completions.create(model="decoder", prompt=prompt, max_tokens=24, temperature=0).choices[0].text

    def stream(prompt: str) -> str:
        options: dict[str, Any] = {"model": "decoder", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        return "".join(chunk.choices[0].text for chunk in api.completions.create(**options, stream=True))

    with ThreadPoolExecutor(10) as pool:
        texts = list(pool.map(complete, PROMPTS)) + list(pool.map(stream, PROMPTS))
    assert texts == expected * 2


def test_the_batch_processor_gives_the_same_texts(model: Path, expected: list[str]) -> None:
    with BatchProcessor(model, max_batch_size=3, device="cpu", blocks=64) as batches:
        assert batches.process(PROMPTS, max_tokens=24) == expected


def test_the_context_is_no_larger_than_the_cache(model: Path, memory_model: Path) -> None:
    for folder, blocks, context in ((model, 64, 200), (model, 4, 64), (memory_model, None, None)):
        options = {} if blocks is None else {"blocks": blocks}
        engine, info = load_engine(str(folder), device="cpu", max_rows=2, **options)
        engine.close()
        assert info.context == context and info.device == "cpu" and info.plan == str(engine.plan)


def test_a_seed_fixes_the_text_and_choices_differ(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "decoder", "prompt": "the sea", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    first = [choice.text for choice in api.completions.create(**options, n=3).choices]
    assert [choice.text for choice in api.completions.create(**options, n=3).choices] == first
    assert len(set(first)) == 3
    assert api.completions.create(**{**options, "seed": 8}).choices[0].text == first[1]


def test_chat_with_log_probabilities_and_a_cached_prefix(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the sea is the sea and the land is the land"}]
    options: dict[str, Any] = {"model": "decoder", "messages": messages, "max_tokens": 5, "temperature": 0}
    api.chat.completions.create(**options)
    answer = api.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and answer.usage and answer.usage.prompt_tokens_details
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert entry.logprob == values[0] and values == sorted(values, reverse=True) and values[0] <= 0
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_bias_and_ignored_stop_tokens_reach_the_engine(api: openai.OpenAI) -> None:
    token = byte_tokenizer().encode("Z", add_special_tokens=False).ids[0]
    options: dict[str, Any] = {"model": "decoder", "prompt": "a", "max_tokens": 6, "temperature": 0}
    biased = api.completions.create(**options, logit_bias={str(token): 100})
    assert biased.choices[0].text == "ZZZZZZ"
    assert api.completions.create(**options, logit_bias={str(token): 100}, stop="ZZZ").choices[0].text == ""


def test_json_schema_and_regex_hold(api: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sea": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["sea", "n"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = api.chat.completions.create(
            model="decoder",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=100,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        found = json.loads(answer.choices[0].message.content or "")
        assert found.keys() == {"sea", "n"} and found["n"] in (1, 22)
    text = api.completions.create(model="decoder", prompt="a", extra_body={"guided_regex": "[ab]{3}c"}).choices[0].text
    assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="decoder", prompt="a", extra_body={"guided_regex": "("})
    assert refused.value.code in ("invalid_grammar", None)


@pytest.mark.parametrize(
    "bomb",
    [
        {"guided_regex": "(a|aa)+" * 200},
        {
            "guided_json": {
                "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(12)]} for i in range(12)]
            }
        },
        {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    ],
    ids=["regex", "products", "recursion"],
)
def test_bombs_of_grammars_end_only_their_own_request(api: openai.OpenAI, bomb: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="decoder", prompt="a", extra_body=bomb)
    assert refused.value.code == "invalid_grammar"
    assert api.completions.create(model="decoder", prompt="a", max_tokens=1).choices


def test_scores_of_a_prompt_are_those_of_the_model(api: openai.OpenAI, model: Path) -> None:
    generator = TextGenerator(model, device="cpu")
    tokens = generator.tokenizer.encode("the sea is the land").ids
    answer = api.completions.create(model="decoder", prompt=tokens, echo=True, logprobs=2, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.top_logprobs
    with torch.no_grad():
        whole = generator.folder.load(torch.float32, torch.device("cpu"))(torch.tensor([tokens]))[0].log_softmax(-1)
    expected = whole[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found: Any = logprobs.token_logprobs
    assert found[0] is None and torch.allclose(torch.tensor(found[1:-1]), expected, atol=1e-4)
    # The generated token continues where the prompt ends.
    assert abs(found[-1] - whole[-1].max().item()) < 1e-4 or found[-1] < whole[-1].max().item()
    assert max(logprobs.top_logprobs[1].values()) == pytest.approx(whole[0].max().item(), abs=1e-4)


def test_embeddings_have_the_length_one(api: openai.OpenAI) -> None:
    data = api.embeddings.create(model="decoder", input=["the sea", "the sea", "land"]).data
    first, same, other = (torch.tensor(entry.embedding) for entry in data)
    assert torch.allclose(first.norm(), torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(first, same, atol=1e-5) and not torch.allclose(first, other, atol=1e-3)


@pytest.fixture(scope="module")
def memory_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "memory"
    tokenizer = byte_tokenizer()
    config = TitanConfig(
        tokenizer.get_vocab_size(), 32, 2, 4, attention_every=2, segment=8, memory_slots=5, memory_compression_ratio=0.5
    )
    model = TitanModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    save_memory_model(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_session_continues_in_another_process(memory_model: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    parts = [tokenizer.encode(text).ids for text in ("the sea is the sea and ", "the land is the land; ")]
    options: dict[str, Any] = {"device": "cpu", "max_rows": 4, "session_folder": str(tmp_path)}

    def continued(engine: Engine, name: str, part: int, salt: str = "") -> list[int]:
        engine.submit(Request("x", parts[part], 8, session=name, salt=salt))
        tokens = []
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.tokens]
        return tokens

    engine, _ = load_engine(str(memory_model), **options)
    for name in ("one", "two"):
        continued(engine, name, 0)
    second, fresh = continued(engine, "two", 1), continued(engine, "three", 1)
    engine.close()
    with redline.serve(memory_model, port=0, **options) as server:

        def complete() -> str:
            body = {"prompt": parts[1], "max_tokens": 8, "temperature": 0, "session_id": "one"}
            answer = send(f"{server.url}/v1/completions", body)
            assert answer.status == 200, answer.body
            return answer.json["choices"][0]["text"]

        assert complete() == tokenizer.decode(second) != tokenizer.decode(fresh)
        assert send(f"{server.url}/v1/sessions/one", method="DELETE").status == 200
        assert send(f"{server.url}/v1/sessions/one", method="DELETE").status == 404
        assert complete() == tokenizer.decode(fresh)


@pytest.mark.slow
def test_malformed_requests_do_not_end_the_engine(model: Path) -> None:
    limits = Limits(body_s=0.2, request_s=1.0)
    with redline.serve(model, port=0, device="cpu", max_rows=8, blocks=64, limits=limits) as server:
        check_malformed(server, 2000)
        assert server.services.backend.restarts == 0


@pytest.mark.slow
def test_the_command_serves_until_it_is_terminated(model: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "redline", "serve", str(model), "--port", "0", "--device", "cpu", "--json-logs"]
    environment = {**os.environ, "REDLINE_API_KEYS": "a-long-enough-key"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        events = map(json.loads, lines)
        ready = next(event for event in events if event["message"] == "ready")
        bearer = {"Authorization": "Bearer a-long-enough-key"}
        assert send(f"{ready['url']}/v1/models", headers=bearer).json["data"][0]["id"] == "decoder"
        assert send(f"{ready['url']}/v1/models").status == 401
        begun_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = list(events)
        assert process.wait(PATIENCE_S) == 0 and time.monotonic() - begun_s < 10
        assert [(entry["path"], entry["status"], entry["caller"]) for entry in rest if "path" in entry] == [
            ("/v1/models", 200, "environment-1"),
            ("/v1/models", 401, "anyone"),
        ]
