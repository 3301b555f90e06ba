"""Files of prompts: the texts of single calls in the order of the lines, and runs that go on where they stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RedlineError
from redline.generation import Engine
from redline.generation.batch_file import find_failures, settings_path
from redline.generation.text_generator import TextGenerator
from redline.models.decoder import save_decoder

from .test_text_generator import TEMPLATE, add_template
from .tiny_language_model import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch") / "model"
    write_model(folder)
    add_template(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def generator(folder: Path) -> TextGenerator:
    return TextGenerator(folder, device="cpu")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_texts_are_those_of_single_calls_in_the_order_of_the_lines(generator: TextGenerator, tmp_path: Path) -> None:
    lines = [
        "the sea",
        {"id": "é", "prompt": "the land is the", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "the sea"}], "temperature": 1.0, "seed": 4},
        {"prompt": [5, 6, 7], "id": 12},
    ]
    out = tmp_path / "out.jsonl"
    assert generator.run_file(write(tmp_path / "in.jsonl", *lines), out, max_tokens=9) == 4
    found = read(out)
    assert [one["id"] for one in found] == ["1", "é", "3", "12"]
    assert [one["tokens"] for one in found] == [9, 3, 9, 9] and all(one["reason"] == "length" for one in found)
    assert found[0]["text"] == generator("the sea", max_tokens=9)
    assert found[1]["text"] == generator("the land is the", max_tokens=3)
    chat = generator.chat([{"role": "user", "content": "the sea"}], max_tokens=9, temperature=1.0, seed=4)
    assert found[2]["text"] == chat


def test_openai_requests_get_openai_responses(generator: TextGenerator, tmp_path: Path) -> None:
    def request(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "any"} | body}

    messages = [{"role": "user", "content": "the sea"}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sea", "land"]}}}
    lines = [
        request("chat", "/v1/chat/completions", messages=messages, max_completion_tokens=5, logit_bias={"7": 1}),
        request("text", "/v1/completions", prompt="the sea", max_tokens=4),
        request("json", "/v1/chat/completions", messages=messages, response_format=schema),
        request("bad", "/v1/chat/completions", messages=messages, temperature=-1),
        request("tools", "/v1/chat/completions", messages=messages, tools=[{}]),
        request("long", "/v1/completions", prompt="x" * 900),
    ]
    out = tmp_path / "out.jsonl"
    generator.run_file(write(tmp_path / "in.jsonl", *lines), out)
    found = {one["custom_id"]: one["response"] for one in read(out)}
    assert [one["status_code"] for one in found.values()] == [200, 200, 200, 400, 400, 400]
    body = found["chat"]["body"]
    assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["message"]["role"] == "assistant"
    assert found["text"]["body"]["choices"][0]["text"] == generator("the sea", max_tokens=4)
    assert json.loads(found["json"]["body"]["choices"][0]["message"]["content"]) in ("sea", "land")
    errors = [found[name]["body"]["error"]["message"] for name in ("bad", "tools", "long")]
    assert errors[0] == "temperature must be at least 0, not -1."
    assert errors[1] == "tools is not supported in batches." and "the model's context is 200" in errors[2]


def test_stop_texts_end_a_text_before_them(generator: TextGenerator, tmp_path: Path) -> None:
    whole = generator("the sea", max_tokens=40)
    stop = whole[10:13]
    lines = [{"prompt": "the sea", "stop": stop, "max_tokens": 40}]
    generator.run_file(write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    (found,) = read(tmp_path / "out.jsonl")
    assert (found["text"], found["reason"]) == (whole[: whole.index(stop)], "stop")
    assert not generator.engine.engine.has_work or generator.engine.engine.step()


def test_a_run_goes_on_after_its_whole_lines(
    generator: TextGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write(
        tmp_path / "in.jsonl", *({"prompt": "the sea" + " the" * n, "max_tokens": 2 + n} for n in range(12))
    )
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    generator.run_file(prompts, whole)
    sound, steps = Engine.step, []

    def step(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return sound(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            generator.run_file(prompts, parts)
    done = len(read(parts))
    assert 0 < done < 12 and generator.engine.engine.stats().running == 0
    with parts.open("a") as file:
        file.write('{"id": "7", "te')
    seen: list[tuple[int, int]] = []
    assert generator.run_file(prompts, parts, lambda *counts: seen.append(counts)) == 12 - done
    assert parts.read_text() == whole.read_text()
    assert seen[0] == (done, 12) and seen[-1] == (12, 12)
    assert generator.run_file(prompts, parts) == 0 and parts.read_text() == whole.read_text()


def test_results_of_other_prompts_are_not_continued(generator: TextGenerator, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", {"id": "a", "prompt": "the sea"})
    for lines in ([{"id": "b", "text": ""}], [{"id": "a", "text": ""}, {"id": "c", "text": ""}], ["x"]):
        out = write(tmp_path / "out.jsonl", *lines)
        before = out.read_bytes()
        with pytest.raises(RedlineError, match="does not hold the results of these prompts .line [12].: delete it"):
            generator.run_file(prompts, out)
        assert out.read_bytes() == before
    with pytest.raises(RedlineError, match="is the file of prompts: choose another file for the results"):
        generator.run_file(prompts, prompts)


def test_results_of_other_settings_are_not_continued(generator: TextGenerator, folder: Path, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "in.jsonl", "the sea", "the land"), tmp_path / "out.jsonl"
    generator.run_file(prompts, out, max_tokens=3)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / folder.name
    model = write_model(other)
    with torch.no_grad():
        model.head.weight.add_(1)
    save_decoder(model, other, stop_tokens=(1,))
    whole = out.read_bytes()
    advice = r"choose another file for the results .--out., or delete '.*out.jsonl'"
    # A file whose last line was cut off, as by a crash, is not shortened either.
    for content in (whole, whole[:-5]):
        out.write_bytes(content)
        for one, options, words in (
            (generator, {"max_tokens": 4}, "max_tokens was 3, and now is 4"),
            (generator, {"max_tokens": 3, "temperature": 0.5}, "temperature was 0.0, and now is 0.5"),
            (TextGenerator(folder, device="cpu", precision="bf16"), {"max_tokens": 3}, "plan was|precision was"),
            (TextGenerator(folder, device="cpu", plan="fused_ops"), {"max_tokens": 3}, "plan was"),
            (TextGenerator(other, device="cpu"), {"max_tokens": 3}, "weights was"),
        ):
            with pytest.raises(RedlineError, match=f"made with other settings .({words}).*{advice}"):
                one.run_file(prompts, out, **options)
            assert out.read_bytes() == content
    # Another process with the same settings goes on, and the deleted file begins anew.
    assert TextGenerator(folder, device="cpu").run_file(prompts, out, max_tokens=3) == 1 and out.read_bytes() == whole
    settings_path(out).unlink()
    with pytest.raises(RedlineError, match=f"there is no .*settings.json', which says how .* were made: {advice}"):
        generator.run_file(prompts, out, max_tokens=3)
    out.unlink()
    assert generator.run_file(prompts, out, max_tokens=4) == 2
    out.unlink()
    assert generator.run_file(prompts, out, max_tokens=3) == 2 and out.read_bytes() == whole


def test_a_quantized_model_goes_on(folder: Path, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "in.jsonl", "the sea", "the land"), tmp_path / "out.jsonl"
    plan = "fused_ops + int8(min_features=16)"
    assert TextGenerator(folder, device="cpu", plan=plan).run_file(prompts, out, max_tokens=3) == 2
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])
    assert TextGenerator(folder, device="cpu", plan=plan).run_file(prompts, out, max_tokens=3) == 1
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 of .*in.jsonl' cannot be read"),
        ("7", "line 2 of .* must be a text or an object"),
        ('{"text": "x"}', "must have either a prompt or messages"),
        ('{"prompt": "x", "messages": []}', "must have either a prompt or messages"),
        ('{"prompt": "x", "id": []}', "has an id that is neither a text nor a number"),
        ('{"url": "/v1/images", "body": {}}', "a url that is one of /v1/chat/completions, /v1/completions"),
        ('{"prompt": "x", "stopp": 1}', r"line 2 of .*: unknown field 'stopp' .did you mean 'stop'\?."),
        ('{"prompt": "x", "zzz": null}', r"line 2 of .*: unknown field 'zzz'\."),
        ('{"prompt": "x", "tools": [{}]}', "line 2 of .*: tools is not supported in batches"),
        ('{"prompt": "x", "max_tokens": "five"}', 'line 2 of .*: max_tokens must be a whole number, not "five"'),
        ('{"prompt": "x", "max_tokens": 0}', "line 2 of .*: max_tokens must be at least 1 token, not 0"),
        ('{"prompt": "x", "max_completion_tokens": 1.5}', "line 2 of .*: max_completion_tokens must be a whole number"),
        ('{"prompt": "x", "min_tokens": -1}', "line 2 of .*: min_tokens must be at least 0, not -1"),
        ('{"prompt": "x", "temperature": true}', "line 2 of .*: temperature must be a number, not true"),
        ('{"prompt": "x", "temperature": -1}', "line 2 of .*: temperature must be at least 0"),
        ('{"prompt": "x", "n": 2}', "line 2 of .*: n must be 1 in batches"),
        ('{"prompt": "x", "stop": ["", 3]}', "line 2 of .*: stop must be a text or a list of texts"),
        ('{"prompt": "x", "stop": 0}', "line 2 of .*: stop must be a text or a list of texts"),
        ('{"prompt": "x", "ignore_eos": "yes"}', "line 2 of .*: ignore_eos must be true or false"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "line 2 of .*: logit_bias must be an object of token ids"),
        ('{"prompt": "x", "logit_bias": []}', "line 2 of .*: logit_bias must be an object of token ids"),
        ('{"prompt": "x", "response_format": {"type": "xml"}}', "line 2 of .*: response_format must have the type"),
        ('{"prompt": 7}', "line 2 of .*: prompt must be a text or a list of token ids"),
        ('{"prompt": []}', "line 2 of .*: prompt must be a text or a list of token ids"),
        ('{"messages": "x"}', "line 2 of .*: messages must be a list of objects"),
    ],
)
def test_a_wrong_line_is_found_before_any_work_is_done(
    line: str, words: str, generator: TextGenerator, tmp_path: Path
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(f'"the sea"\n{line}\n')
    with pytest.raises(RedlineError, match=words):
        generator.run_file(prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [900]}, "token 900 is not in the model's vocabulary"),
        ({"prompt": "x" * 900}, "the model's context is 200"),
    ],
)
def test_a_wrong_request_has_an_error_and_the_others_go_on(
    change: dict[str, Any], words: str, generator: TextGenerator, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "in.jsonl", {"prompt": "the sea"} | change, "the sea")
    generator.run_file(prompts, tmp_path / "out.jsonl", max_tokens=2)
    first, second = read(tmp_path / "out.jsonl")
    assert words in first["error"] and second["tokens"] == 2
    assert find_failures(tmp_path / "out.jsonl") == (1, f"1: {first['error']}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": "9"}, 'max_tokens must be a whole number, not "9"'),
        ({"n": 2}, "n must be 1 in batches"),
        ({"response_format": {"type": "xml"}}, "response_format must have the type text, json_object, or json_schema"),
        ({"prompt": []}, "the request needs a prompt"),
    ],
)
def test_a_wrong_body_has_an_error_and_unknown_fields_of_bodies_are_ignored(
    change: dict[str, Any], words: str, generator: TextGenerator, tmp_path: Path
) -> None:
    body = {"prompt": "the sea", "user": "someone", "max_tokens": 2}
    lines = [{"custom_id": name, "url": "/v1/completions", "body": body} for name in "ab"]
    lines[0] = lines[0] | {"body": body | change}
    generator.run_file(write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    first, second = (one["response"] for one in read(tmp_path / "out.jsonl"))
    message = first["body"]["error"]["message"]
    assert first["status_code"] == 400 and words in message and second["status_code"] == 200
    assert find_failures(tmp_path / "out.jsonl") == (1, f"a: {message}")
