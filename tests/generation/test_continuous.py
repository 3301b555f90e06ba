"""Requests that arrive at any time, in any company: their texts are transformers', and those they would get alone."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from redline.errors import RedlineError
from redline.generation import Engine, InferenceEngine, Request, SamplingOptions
from redline.generation.request import Finish, Grammar, Output
from redline.models.decoder import Decoder, load_decoder
from redline.models.memory import TitanModel

from .conftest import FakeRecorder
from .oracles import FAMILIES, VOCABULARY, greedy_mistakes, make_oracle
from .tiny_language_model import byte_tokenizer


def random_requests(count: int, choice: random.Random, longest: int = 24) -> list[Request]:
    """Many share the beginning of their prompts."""
    heads = [choice.choices(range(VOCABULARY), k=30) for _ in range(3)]
    found = []
    for number in range(count):
        head = choice.choice(heads)[: choice.randrange(31)] if choice.random() < 0.6 else []
        prompt = head + choice.choices(range(VOCABULARY), k=choice.randint(1, 20))
        found.append(Request(str(number), prompt, choice.randint(1, longest)))
    return found


def random_engine(model: Decoder, choice: random.Random) -> Engine:
    size = choice.choice((1, 3, 8, 16))
    blocks = max(choice.choice((8, 20, 200)), -(-80 // size))
    return Engine(
        model,
        blocks=blocks,
        block_size=size,
        token_budget=choice.choice((9, 30, 200)),
        max_rows=choice.choice((3, 8)),
        chunk=choice.choice((2, 5, 64)),
        prompt_cost=choice.choice((4, 100)),
        drafts=choice.choice((0, 3)),
        behind=choice.choice((0, 1)),
        recorder=FakeRecorder() if choice.random() < 0.3 else None,
    )


def run(engine: Engine, requests: Sequence[Request], choice: random.Random | None = None) -> dict[str, list[Output]]:
    """Returns the outputs of each request. With `choice`, the requests arrive while others run."""
    todo, found = list(requests), {request.id: [] for request in requests}
    while todo or engine.has_work:
        while todo and (choice is None or choice.random() < 0.5):
            engine.submit(todo.pop(0))
        for output in engine.step():
            found[output.id].append(output)
    return found


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def check_family(family: str, folder: Path, engines: int, requests: int) -> None:
    oracle = make_oracle(family, folder)
    model, counts = load_decoder(folder), dict.fromkeys(("cached_tokens", "preemptions", "accepted_tokens"), 0)
    for seed in range(engines):
        choice = random.Random(seed)
        engine, batch = random_engine(model, choice), random_requests(requests, choice)
        found = run(engine, batch, choice)
        texts = [tokens_of(found[request.id]) for request in batch]
        assert [len(text) for text in texts] == [request.max_tokens for request in batch]
        assert not greedy_mistakes(oracle, [request.prompt for request in batch], texts)
        assert engine.stats().blocks_used == 0
        for name in counts:
            counts[name] += getattr(engine.stats(), name)
    assert all(counts.values()), counts


@pytest.mark.cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """However requests arrive: in chunks, after prefix hits and preemptions, with drafts, and one step behind."""
    check_family(family, tmp_path, engines=4, requests=17)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_thousand_greedy_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, engines=17, requests=40)


@pytest.mark.cpu
def test_a_memory_model_writes_what_it_writes_alone(memory_model: TitanModel) -> None:
    model, choice = memory_model.double(), random.Random(0)
    batch = [
        replace(request, sampling=SamplingOptions(temperature=choice.choice((0.0, 1.0)), seed=number))
        for number, request in enumerate(random_requests(20, choice, 12))
    ]
    found = run(Engine(model, max_rows=5, chunk=10, prompt_cost=16, recorder=FakeRecorder()), batch, choice)
    alone = Engine(model)
    for request in batch:
        assert tokens_of(run(alone, [request])[request.id]) == tokens_of(found[request.id])


def test_states_take_memory_for_the_rows_that_were_used(memory_model: TitanModel) -> None:
    engine = Engine(memory_model, max_rows=4096)
    one = memory_model.new_state().bytes
    run(engine, [Request(str(number), [1, 2, 3], 2) for number in range(3)])
    run(engine, [Request(str(number), [1, 2, 3], 2) for number in range(2)])
    assert engine.cache_bytes == 4 * one and engine.stats().blocks == 4096


def test_aborts_at_any_time_leave_nothing_behind(spelling: tuple[Decoder, Any]) -> None:
    spelled, tokenizer = spelling
    engine, choice = Engine(spelled, tokenizer=tokenizer, drafts=3, behind=1, max_rows=4), random.Random(0)
    for number in range(150):
        grammar = Grammar("regex", "(sea|land)*") if number % 5 == 0 else None
        prompt = choice.choices(range(70, 90), k=choice.randint(1, 30))
        engine.submit(Request(str(number), prompt, 9, grammar=grammar, logprobs=number % 2))
        for _ in range(choice.randrange(3)):
            engine.step()
        engine.abort(str(choice.randint(0, number)))
    while engine.has_work:
        engine.step()
    assert engine.stats().blocks_used == 0 and engine._lookup is not None
    held = (engine._matchers, engine._compiling, engine._lookup._indexed, engine._ended, engine.scheduler._sequences)
    assert not any(held) and len(engine.scheduler._rows) == 4


SETTINGS = (
    SamplingOptions(temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.3, seed=11),
    SamplingOptions(temperature=0.9, seed=5),
    SamplingOptions(frequency_penalty=0.7, presence_penalty=0.2),
    SamplingOptions(temperature=1.5, top_k=7, logit_bias={3: 4.0}, seed=2),
)


@pytest.mark.cpu
def test_drawn_texts_are_the_same_alone_and_among_others_with_preemptions_and_drafts(model: Decoder) -> None:
    choice = random.Random(3)
    batch = [replace(one, sampling=choice.choice(SETTINGS)) for one in random_requests(16, choice)]
    options: dict[str, Any] = {"block_size": 4, "chunk": 5, "max_rows": 6}
    alone = Engine(model)
    expected = {request.id: tokens_of(run(alone, [request])[request.id]) for request in batch}
    for behind, drafts in ((0, 0), (1, 0), (1, 4)):
        engine = Engine(model, blocks=24, behind=behind, drafts=drafts, **options)
        found = run(engine, batch, random.Random(1))
        assert {name: tokens_of(outputs) for name, outputs in found.items()} == expected
        assert engine.stats().preemptions > 0


def test_a_failed_capture_falls_back_to_plain_steps(model: Decoder) -> None:
    class Full(FakeRecorder):
        def capture(self, run: Any) -> Any:
            if self.recorded == 2:
                raise RuntimeError("no memory")
            return super().capture(run)

    batch = random_requests(9, random.Random(0))
    engine = Engine(model, recorder=Full(), max_rows=5)
    with pytest.warns(UserWarning, match=r"because the capture of a CUDA graph failed: no memory\.$"):
        found = run(engine, batch)
    assert found == run(Engine(model, max_rows=5), batch)


def test_steps_are_captured_before_the_first_request(model: Decoder) -> None:
    recorder = FakeRecorder()
    engine = Engine(model, recorder=recorder, max_rows=4, token_budget=64)
    engine.warm_up()
    recorded, batch = recorder.recorded, random_requests(9, random.Random(0))
    found = run(engine, batch)
    assert recorder.recorded == recorded and recorder.replayed > 20
    assert found == run(Engine(model, max_rows=4, token_budget=64), batch)


def test_outputs_say_why_they_ended_and_what_was_cached(model: Decoder) -> None:
    engine = Engine(model, block_size=4)
    prompt = random.Random(0).choices(range(VOCABULARY), k=13)
    (last,) = run(engine, [Request("0", prompt, 3)])["0"][-1:]
    assert (last.finish, last.cached_tokens) == (Finish.LENGTH, 0)
    text = tokens_of(run(engine, [Request("1", prompt, 20)])["1"])
    stop = next(token for token in text[4:] if token not in text[:4])
    outputs = run(engine, [Request("2", prompt, 20, stop_tokens=frozenset({stop}))])["2"]
    assert (outputs[-1].finish, outputs[-1].cached_tokens) == (Finish.STOP, 12)
    assert tokens_of(outputs) == text[: text.index(stop)]
    never = Request("3", prompt, 20, stop_tokens=frozenset({stop}), min_tokens=20)
    outputs = run(engine, [never])["3"]
    assert len(tokens_of(outputs)) == 20 and stop not in tokens_of(outputs)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.running, stats.blocks_used) == (52, 36, 0, 0)


def test_log_probabilities_belong_to_their_tokens(model: Decoder) -> None:
    request = Request("0", [5, 6, 7], 9, logprobs=3)
    for drafts in (0, 3):
        outputs = run(Engine(model, drafts=drafts), [request, Request("1", [5, 6], 9)])["0"]
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        assert [entry.token for entry in entries] == tokens_of(outputs)
        text = torch.tensor([[*request.prompt, *tokens_of(outputs)]])
        with torch.no_grad():
            expected = model(text).log_softmax(-1)[0, 2:]
        for entry, row in zip(entries, expected, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-5)
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
            assert entry.top[0] == (entry.token, pytest.approx(entry.logprob))


def test_aborted_requests_give_their_blocks_back_at_once(model: Decoder) -> None:
    engine = Engine(model, max_rows=2, behind=1)
    for name in "abc":
        engine.submit(Request(name, [1, 2, 3], 50))
    engine.step(), engine.step()
    assert engine.stats().blocks_used > 0
    for name in "abc":
        engine.abort(name)
    engine.abort("a"), engine.abort("unknown")
    assert engine.stats().blocks_used == 0
    ends = [(output.id, output.finish) for _ in range(3) for output in engine.step()]
    assert sorted(ends) == [(name, Finish.ABORTED) for name in "abc"] and not engine.has_work
    engine.submit(Request("a", [1, 2, 3], 5))
    engine.abort("a")
    # An aborted request has ended, so its id can be used again.
    assert len(tokens_of(run(engine, [Request("a", [1, 2, 3], 5)])["a"])) == 5


def test_a_text_that_is_not_finite_ends_alone_and_leaves_nothing_behind(model: Decoder) -> None:
    with torch.no_grad():
        model.embedding.weight[7] = float("nan")
        model.head.weight[7] = 0
    engine, good = Engine(model, block_size=2), Request("good", [4, 1, 2, 3], 9)
    (expected,) = InferenceEngine(model).generate([good.prompt], max_tokens=9)
    found = run(engine, [Request("bad", [1, 2, 3, 7, 4, 5], 9), good])
    (last,) = found["bad"]
    assert last.finish == Finish.ERROR and last.error.startswith("the model's logits are not finite")
    assert tokens_of(found["good"]) == expected.tokens
    # A text that begins like the broken one shares none of its blocks.
    (expected,) = InferenceEngine(model).generate([[1, 2, 3]], max_tokens=9)
    outputs = run(engine, [Request("next", [1, 2, 3], 9)])["next"]
    assert tokens_of(outputs) == expected.tokens and outputs[-1].cached_tokens == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [101]}, "token 101 is not in the model's vocabulary of 101"),
        ({"prompt": [1] * 120}, "the prompt has 120 tokens, and the model's context is 120"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 token, not 0"),
        ({"max_tokens": 60}, "may grow to 63 tokens, and the key-value cache has room for 60: ask for fewer"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
        ({"adapter": "french"}, "unknown adapter 'french'"),
        ({"grammar": Grammar("json")}, "structured output needs a tokenizer"),
        ({"session": "me"}, "a state needs a model with neural memory"),
    ],
)
def test_requests_that_cannot_run_are_refused(change: dict[str, Any], words: str, model: Decoder) -> None:
    engine = Engine(model, blocks=15, block_size=4)
    with pytest.raises(RedlineError, match=words):
        engine.submit(replace(Request("0", [1, 2, 3], 5), **change))
    assert not engine.has_work


def test_a_request_needs_an_id_of_its_own(model: Decoder) -> None:
    engine = Engine(model)
    engine.submit(Request("0", [1], 5))
    with pytest.raises(RedlineError, match="already a request with the id '0'"):
        engine.submit(Request("0", [1], 5))


def test_embeddings_are_pooled_hidden_states(model: Decoder, memory_model: TitanModel) -> None:
    prompts = [[1, 2, 3], [4] * 30, [5], [6, 7]]
    for one in (model, memory_model):
        engine = Engine(one)
        for pooling in ("mean", "last"):
            found = engine.embed(prompts, pooling)
            for prompt, vector in zip(prompts, found, strict=True):
                with torch.no_grad():
                    hidden = one.hidden(torch.tensor([prompt]))[0].float()
                expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
                torch.testing.assert_close(torch.tensor(vector), expected / expected.norm(), atol=1e-5, rtol=1e-4)
        with pytest.raises(RedlineError, match="unknown pooling 'max': use one of mean, last"):
            engine.embed(prompts, "max")
    with pytest.raises(RedlineError, match="the prompt has 121 tokens, and the model's context is 120"):
        Engine(model).embed([[1] * 121])


SCHEMA = {
    "type": "object",
    "properties": {"sea": {"type": "integer", "minimum": 0, "maximum": 99}, "land": {"enum": ["a", "b"]}},
    "required": ["sea", "land"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def spelling() -> tuple[Decoder, Any]:
    """A model with the vocabulary of a tokenizer of bytes."""
    from redline.models.decoder import DecoderConfig

    torch.manual_seed(1)
    tokenizer = byte_tokenizer()
    return Decoder(DecoderConfig(tokenizer.get_vocab_size() + 3, 32, 2, 4, 48, context=400)).eval(), tokenizer


@pytest.mark.parametrize("behind", [0, 1])
def test_structured_texts_match_their_grammar(behind: int, spelling: tuple[Decoder, Any]) -> None:
    model, tokenizer = spelling
    engine = Engine(model, tokenizer=tokenizer, vocabulary=tokenizer.get_vocab_size(), behind=behind, drafts=2)
    grammars = [
        Grammar("json_schema", json.dumps(SCHEMA)),
        Grammar("regex", "(sea|land){3}x"),
        Grammar("lark", 'start: "a"~4'),
    ]
    requests = []
    for number in range(12):
        options = SamplingOptions(temperature=2.0 * (number % 2), seed=number)
        grammar, stops = grammars[number % 3], frozenset({1}) if number % 4 else frozenset()
        requests.append(Request(str(number), [0, 70, 71], 300, options, stops, grammar=grammar))
    free = Request("free", [0, 70, 71], 20)
    found = run(engine, [*requests, free])
    for number, request in enumerate(requests):
        text, last = tokenizer.decode(tokens_of(found[request.id])), found[request.id][-1]
        assert last.finish == Finish.STOP, (text, last)
        if number % 3 == 0:
            value = json.loads(text)
            assert set(value) == {"sea", "land"} and 0 <= value["sea"] <= 99 and value["land"] in ("a", "b")
        else:
            assert re.fullmatch("(sea|land){3}x|aaaa", text)
    assert tokens_of(found["free"]) == tokens_of(
        run(Engine(model, vocabulary=tokenizer.get_vocab_size()), [free])["free"]
    )


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "the grammar is not valid: "),
        (Grammar("json_schema", '{"type": 5}'), "type must be a string or array of strings"),
        (Grammar("regex", "(a|b"), "the grammar is not valid: "),
        (Grammar("lark", "start: nothing"), "the grammar is not valid: "),
        (Grammar("xml", "<a>"), "unknown kind of grammar 'xml': use one of json, json_schema, regex, lark"),
    ],
)
def test_invalid_grammars_end_their_request_with_a_sentence(
    grammar: Grammar, words: str, spelling: tuple[Decoder, Any]
) -> None:
    model, tokenizer = spelling
    engine = Engine(model, tokenizer=tokenizer)
    (output,) = run(engine, [Request("0", [1, 2], 9, grammar=grammar), Request("1", [1, 2], 9)])["0"]
    assert output.finish == Finish.ERROR and words in output.error and output.error.endswith(".")
    with pytest.raises(RedlineError, match="the grammar has 300,000 characters; at most 200,000"):
        engine.submit(Request("0", [1], 9, grammar=Grammar("regex", "a" * 300_000)))


def test_a_grammar_that_compiles_for_too_long_ends_its_request(
    spelling: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    from redline.generation import engine as module
    from redline.generation.grammar import GrammarCompiler

    model, tokenizer = spelling
    monkeypatch.setattr(module, "_GRAMMAR_TIMEOUT_S", 0.05)
    monkeypatch.setattr(GrammarCompiler, "start", lambda *_: Future())
    engine = Engine(model, tokenizer=tokenizer)
    found = run(engine, [Request("slow", [1, 2], 9, grammar=Grammar("json")), Request("other", [1, 2], 9)])
    assert len(tokens_of(found["other"])) == 9
    assert "compiling the grammar takes longer than 0.05 s" in found["slow"][0].error
    engine.submit(Request("left", [1], 9, grammar=Grammar("json")))
    engine.abort("left")
    assert [output.finish for output in engine.step()] == [Finish.ABORTED] and not engine.has_work
