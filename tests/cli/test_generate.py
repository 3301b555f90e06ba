"""`redline generate`: text as it comes, its speed as JSON, and a sentence for everything that cannot be."""

import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_python import COMMAND_LINE, ForkedPython
from redline.generation import InferenceEngine
from redline.generation.text_stream import TextStream
from redline.models.decoder import Decoder, save_decoder
from redline.models.memory import TitanConfig, TitanModel, load_memory_model, save_memory_model

from ..generation.tiny_language_model import byte_tokenizer, write_model
from .conftest import Seen
from .test_bad_input import assert_one_sentence

PROMPT = "the sea is 🙂"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_config_that_is_nested_too_deeply_is_bad_input(folder: Path, command: Callable[..., Seen]) -> None:
    (folder / "config.json").write_text('{"a":' * 200_000)
    seen = command("generate", folder, PROMPT, "--device", "cpu")
    assert_one_sentence(seen, "config.json' is not a readable model file: it is nested too deeply.")


def test_the_text_is_the_models(folder: Path, command: Callable[..., Seen]) -> None:
    from redline.generation.folder import ModelFolder
    from redline.models.decoder import load_decoder

    tokenizer = ModelFolder.open(folder).tokenizer
    prompt = tokenizer.encode(PROMPT).ids
    (completion,) = InferenceEngine(load_decoder(folder)).generate([prompt], max_tokens=40)
    whole = tokenizer.decode([*prompt, *completion.tokens]).removeprefix(PROMPT)
    seen = command("generate", folder, PROMPT, "--max-tokens", 40, "--device", "cpu")
    assert seen.code == 0
    assert seen.out.replace("\ufffd", "") == whole.replace("\ufffd", "") + "\n"
    figures = command("generate", folder, PROMPT, "--max-tokens", 40, "--device", "cpu", "--json").json()
    assert figures["text"] == seen.out[:-1]
    assert (figures["tokens"], figures["prompt_tokens"]) == (40, len(prompt))
    assert figures["ended_by"] == "length" and figures["plan"] == "eager" and figures["device"] == "cpu"
    assert figures["prefill_ms"] > 0 and figures["tokens_per_s"] > 1
    assert 0 < figures["token_ms_p50"] <= figures["token_ms_p95"]


def test_a_seed_gives_its_text_again(folder: Path, command: Callable[..., Seen]) -> None:
    def text(*options: object) -> str:
        return command("generate", folder, PROMPT, "--max-tokens", 30, "--device", "cpu", *options).out

    warm = ("--temperature", 1.5, "--top-p", 0.95)
    assert text(*warm, "--seed", 4) == text(*warm, "--seed", 4) != text(*warm, "--seed", 5)


def test_the_prompt_may_come_from_stdin(
    folder: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = command("generate", folder, PROMPT, "--max-tokens", 5, "--device", "cpu").out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode()), encoding="latin-1"))
    assert command("generate", folder, "-", "--max-tokens", 5, "--device", "cpu").out == given
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfa"), encoding="utf-8"))
    assert_one_sentence(command("generate", folder, "-"), "stdin is not UTF-8")


def test_a_plan_and_a_single_token(folder: Path, command: Callable[..., Seen]) -> None:
    options = ("--max-tokens", 1, "--device", "cpu", "--json", "--plan", "fused_ops + int8(min_features=16)")
    figures = command("generate", folder, PROMPT, *options).json()
    assert figures["plan"] == "fused_ops + int8(min_features=16)" and figures["tokens"] == 1
    assert figures["tokens_per_s"] is None


def test_a_memory_model_writes_too(command: Callable[..., Seen], tmp_path: Path) -> None:
    remembering = tmp_path / "remembering"
    config = TitanConfig(byte_tokenizer().get_vocab_size(), 32, 2, 4, attention_every=2, segment=8, memory_slots=5)
    save_memory_model(TitanModel(config), remembering)
    byte_tokenizer().save(str(remembering / "tokenizer.json"))
    figures = command("generate", remembering, PROMPT, "--max-tokens", 30, "--device", "cpu", "--json").json()
    assert (figures["tokens"], figures["ended_by"]) == (30, "length")


@pytest.fixture
def remembering(tmp_path: Path) -> Path:
    """With more rows in its vocabulary than its tokenizer has tokens."""
    config = TitanConfig(byte_tokenizer().get_vocab_size() + 20, 32, 2, 4, attention_every=2, segment=8, memory_slots=5)
    model = TitanModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    save_memory_model(model, tmp_path / "remembering")
    byte_tokenizer().save(str(tmp_path / "remembering" / "tokenizer.json"))
    return tmp_path / "remembering"


def test_a_text_continues_from_a_saved_memory(remembering: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    def said(prompt: str, *options: object) -> dict[str, Any]:
        return command("generate", remembering, prompt, "--device", "cpu", "--json", *options).json()

    memory, tokenizer = tmp_path / "memories" / "sea.safetensors", byte_tokenizer()
    memory.parent.mkdir()
    first = said("the sea", "--max-tokens", 20, "--memory", memory)
    second = said(" and the land", "--max-tokens", 20, "--memory", memory)
    # Only the first text has the token that begins one.
    assert first["prompt_tokens"] + second["prompt_tokens"] == len(tokenizer.encode("the sea and the land").ids)
    engine = InferenceEngine(load_memory_model(remembering), vocabulary=tokenizer.get_vocab_size())
    start, more = tokenizer.encode("the sea").ids, tokenizer.encode(" and the land", add_special_tokens=False).ids
    (one,) = engine.generate([start], max_tokens=20)
    (other,) = engine.generate([[*start, *one.tokens, *more]], max_tokens=20)
    assert second["text"].replace("\ufffd", "") in tokenizer.decode([*more, *other.tokens]).replace("\ufffd", "")
    remembered = engine.new_state().load(memory)
    assert remembered.position_B.item() == len(start) + len(more) + 40
    assert list(memory.parent.iterdir()) == [memory]


def test_a_full_context_prints_a_message(folder: Path, command: Callable[..., Seen]) -> None:
    full = command("generate", folder, "sea", "--device", "cpu", "--max-tokens", 1000)
    ended = "the model's context is full: the text ends here."
    assert full.code == 0 and ended in full.err and ended not in full.out
    assert ended not in command("generate", folder, "sea", "--device", "cpu", "--max-tokens", 2).err


def test_unusable_memory_files_raise(
    folder: Path, remembering: Path, command: Callable[..., Seen], tmp_path: Path
) -> None:
    memory = tmp_path / "memory.safetensors"
    # Before weights are read, which takes minutes for a large one: these cannot be.
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "model.safetensors").write_bytes(b"nothing")
    for plain in (folder, bare):
        seen = command("generate", plain, "a", "--device", "cpu", "--memory", memory)
        assert_one_sentence(seen, "memory needs a model with neural memory; '")
    assert not memory.exists()
    memory.write_bytes(b"nothing")
    seen = command("generate", remembering, "a", "--device", "cpu", "--memory", memory)
    assert_one_sentence(seen, "is not a readable saved state")
    seen = command("generate", remembering, "a", "--device", "cpu", "--memory", tmp_path)
    assert_one_sentence(seen, f"cannot read the saved state {str(tmp_path)!r}: it is a folder.")
    assert memory.read_bytes() == b"nothing"
    seen = command("generate", remembering, "a", "--device", "cpu", "--memory", memory / "inside")
    assert_one_sentence(seen, "is not a folder")
    seen = command(
        "generate", remembering, "a", "--device", "cpu", "--memory", tmp_path / "typo" / "memory.safetensors"
    )
    assert_one_sentence(seen, "memory: there is no folder")
    assert not (tmp_path / "typo").exists()


def test_tokens_without_a_text_are_never_drawn(
    remembering: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    push = TextStream.push
    monkeypatch.setattr(TextStream, "push", lambda self, token: (drawn.append(token), push(self, token))[1])
    command("generate", remembering, "a", "--device", "cpu", "--temperature", 50, "--max-tokens", 200)
    assert len(drawn) == 200 and max(drawn) < byte_tokenizer().get_vocab_size()


def test_bad_input_prints_one_error(folder: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path / "absent", "a"), "there is no folder"),
        ((folder, "the sea " * 100), "tokens, and the model's context is 200"),
        ((folder, "a", "--temperature", "-1"), "temperature must be at least 0"),
        ((folder, "a", "--precision", "fp4"), "unknown precision 'fp4'"),
        ((folder, "a", "--plan", "warp"), "unknown rung 'warp'"),
        ((folder, "a", "--max-tokens", "0"), "max_tokens must be at least 1 token"),
        ((folder, "a", "--seed", "-1"), "seed must be a whole number from 0 to 2^63 − 1, not -1"),
        ((folder / "config.json", "a"), "is a file: give the folder of a model"),
        (("Owner/Name", "a"), "download it with `hf download Owner/Name`"),
    ):
        assert_one_sentence(command("generate", *arguments, "--device", "cpu"), words)
    (folder / "tokenizer.json").rename(tmp_path / "aside.json")
    assert_one_sentence(command("generate", folder, "a"), "has no tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert_one_sentence(command("generate", folder, "a"), "architecture 'mamba'")


@pytest.mark.filterwarnings("always:.*unknown settings")
def test_unknown_settings_are_named_and_strictly_refused(folder: Path, command: Callable[..., Seen]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"made_with": "a tool", "torchscript": False}))
    options = ("generate", folder, "a", "--device", "cpu", "--max-tokens", 1)
    seen = command(*options)
    assert seen.code == 0 and "unknown settings are ignored: 'made_with'." in " ".join(seen.err.split())
    assert_one_sentence(command(*options, "--strict"), "has the unknown setting 'made_with'")


def test_a_model_in_the_hugging_face_cache(
    folder: Path, command: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--Owner--Tiny" / "snapshots" / "0123abc"
    shutil.copytree(folder, snapshot)
    options = ("--device", "cpu", "--max-tokens", 3, "--json")
    found, given = (command("generate", model, PROMPT, *options).json() for model in ("Owner/Tiny", folder))
    assert found["text"] == given["text"] and found["model"] == "Tiny"


@pytest.mark.parametrize("options", [(), ("--temperature", 0.8), ("--json",)], ids=["greedy", "drawn", "json"])
def test_logits_that_are_not_finite_print_one_error(
    options: tuple[object, ...], tmp_path: Path, command: Callable[..., Seen]
) -> None:
    folder = tmp_path / "overflowing"
    model = write_model(folder)
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    save_decoder(model, folder, stop_tokens=(1,))
    seen = command("generate", folder, PROMPT, "--device", "cpu", *options)
    assert_one_sentence(seen, "the model's logits are not finite")
    assert seen.err.count("\n") == 1


def test_a_text_that_breaks_off_ends_its_line(
    folder: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, steps = Decoder.flat, []

    def step(self: Decoder, *arguments: Any) -> Any:
        steps.append(1)
        return sound(self, *arguments) * (1 if len(steps) < 20 else float("nan"))

    monkeypatch.setattr(Decoder, "flat", step)
    seen = command("generate", folder, PROMPT, "--device", "cpu", "--temperature", 2)
    assert seen.code == 2 and len(seen.out) > 1 and seen.out.endswith("\n")
    assert seen.err.count("\n") == 1 and "not finite" in seen.err


def test_a_prompt_that_is_no_text_is_refused(folder: Path, command: Callable[..., Seen]) -> None:
    assert_one_sentence(command("generate", folder, "\udcff\udcfe", "--device", "cpu"), "the prompt is not UTF-8")


def without_progress(errors: bytes) -> list[bytes]:
    """The lines but those that a slow machine adds every 10 seconds."""
    return [line for line in errors.splitlines() if not line.endswith(b" s so far)")]


def test_a_terminal_without_the_characters_gets_others(folder: Path, forked_python: ForkedPython) -> None:
    ascii_only = "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict'); "
    arguments = ["generate", folder, "sea", "--device", "cpu", "--temperature", 2, "--max-tokens", 150]
    seen = forked_python.run(ascii_only + COMMAND_LINE, *arguments)
    assert seen.returncode == 0 and without_progress(seen.stderr.encode()) == []
    assert "?" in seen.stdout and seen.stdout.isascii()


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_leaves_ends_it_quietly(
    options: tuple[str, ...], folder: Path, forked_python: ForkedPython
) -> None:
    arguments = ["generate", folder, "sea", "--device", "cpu", *options]
    read, write = os.pipe()
    os.close(read)
    try:
        seen = forked_python.run(COMMAND_LINE, *arguments, stdout=write)
    finally:
        os.close(write)
    assert (seen.returncode, without_progress(seen.stderr.encode())) == (141, [])


def test_ctrl_c_ends_it_cleanly(tmp_path: Path, forked_python: ForkedPython) -> None:
    folder = tmp_path / "long"
    write_model(folder, context=9000)
    arguments = ["generate", folder, "sea", "--max-tokens", 8000, "--device", "cpu"]
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as pipe, (tmp_path / "errors").open("wb") as errors:
        try:
            process = forked_python.start(COMMAND_LINE, *arguments, cwd=tmp_path, stdout=write, stderr=errors)
        finally:
            os.close(write)
        try:
            first = pipe.read(1)
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGINT)
            out = pipe.read()
        finally:
            process.kill()
    err = (tmp_path / "errors").read_bytes()
    assert process.wait() == 130 and b"Traceback" not in err and b"interrupted" in err
    assert (first + out).endswith(b"\n")
    (first + out).decode("utf-8")


def test_a_file_of_prompts_becomes_a_file_of_results(
    folder: Path, command: Callable[..., Seen], tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('"the sea is"\n{"prompt": "the land is", "max_tokens": 2}\n')
    given = ("generate", folder, "--prompts", prompts, "--out", out, "--device", "cpu", "--max-tokens", 5)
    seen = command(*given)
    assert seen.code == 0 and "2 new results, 2 in all" in seen.err and not seen.out
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found[0]["text"] == command("generate", folder, "the sea is", "--device", "cpu", "--max-tokens", 5).out[:-1]
    assert [one["tokens"] for one in found] == [5, 2]
    figures = {"texts": 2, "new": 0, "failed": 0, "first_error": None, "out": str(out)}
    assert command(*given, "--json").json() == figures


def test_failed_texts_of_a_file_are_counted(folder: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines = ["the sea", {"id": "long", "prompt": "x" * 900}, "the land", {"prompt": [900]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("generate", folder, "--prompts", prompts, "--out", out, "--device", "cpu", "--max-tokens", 2)
    seen = command(*given)
    assert seen.code == 1 and "4 new results, 4 in all" in seen.err
    assert "2 of 4 texts failed; the first error is that of long: " in seen.err
    assert "the model's context is 200" in " ".join(seen.err.split())
    # The same command again finds them too.
    seen = command(*given, "--json")
    figures = json.loads(seen.out)
    assert seen.code == 1 and (figures["texts"], figures["new"], figures["failed"]) == (4, 0, 2)
    assert figures["first_error"].startswith("long: ")


def test_results_of_other_options_are_not_continued(folder: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('"the sea is"\n')
    given = ("generate", folder, "--prompts", prompts, "--out", out, "--device", "cpu")
    assert command(*given, "--max-tokens", 3).code == 0
    before = out.read_bytes()
    words = "max_tokens was 3, and now is 4): choose another file for the results (--out), or delete"
    assert_one_sentence(command(*given, "--max-tokens", 4), words)
    assert out.read_bytes() == before


def test_a_wrong_line_is_found_before_the_weights_are_read(
    folder: Path, command: Callable[..., Seen], tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    (folder / "model.safetensors").write_bytes(b"nothing")
    given = ("generate", folder, "--prompts", prompts, "--out", out, "--device", "cpu")
    for line, words in (
        ('{"prompt": "x", "stopp": 1}', "is wrong: unknown field 'stopp' (did you mean 'stop'?)"),
        ('{"prompt": "x", "max_tokens": "five"}', 'is wrong: max_tokens must be a whole number, not "five"'),
    ):
        prompts.write_text(f'"the sea is"\n{line}\n')
        assert_one_sentence(command(*given), f"line 2 of {str(prompts)!r} {words}")
        assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give either a prompt or a file of prompts"),
        (("the sea", "--prompts", "p.jsonl", "--out", "r.jsonl"), "give either a prompt or a file of prompts"),
        (("--prompts", "p.jsonl"), "--prompts and --out belong together"),
        (("the sea", "--out", "r.jsonl"), "--prompts and --out belong together"),
        (("--prompts", "p.jsonl", "--out", "r.jsonl", "--memory", "m"), "--memory belongs to a single text"),
        (("--prompts", "none.jsonl", "--out", "r.jsonl", "--device", "cpu"), "cannot read 'none.jsonl'"),
    ],
)
def test_bad_calls_for_files_of_prompts(
    options: tuple[str, ...], words: str, folder: Path, command: Callable[..., Seen]
) -> None:
    assert_one_sentence(command("generate", folder, *options), words)
