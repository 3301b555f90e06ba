"""A model that cheats is right in everything, one that guesses in nearly nothing; pieces are as good as a whole."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.errors import ModelError
from redline.evaluation.recall import (
    Mqar,
    Needle,
    Passkey,
    Recall,
    describe,
    evaluate,
    loss_by_position,
    make_task,
    task_in,
)
from redline.evaluation.recall import reading as reading_module
from redline.evaluation.recall.evaluate import _at_once
from redline.evaluation.recall.passkey import KINDS, tokenized_sample
from redline.evaluation.recall.reading import pieces, predict
from redline.evaluation.recall.task import IGNORED
from redline.evaluation.recall.tasks import NAMES
from redline.models.decoder import Decoder, DecoderConfig
from redline.models.memory import MemoryState, TitanConfig, TitanModel
from redline.training.text.tokenizer import byte_tokenizer

from ...generation.tiny_language_model import byte_tokenizer as pair_tokenizer


def load_bytes() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(byte_tokenizer())


class Seen:
    """A cache that is simply the text."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]

    @property
    def bytes(self) -> int:
        return 8 * sum(map(len, self.rows))


class Answering:
    """Says what `answer(row)` says after each row; reads in pieces of any size."""

    vocabulary, context = 256, None

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil, self.random = spoil, torch.Generator().manual_seed(5)

    def answer(self, row: list[int]) -> int:
        raise NotImplementedError

    def new_cache(self, batch: int, length: int) -> Seen:
        return Seen(batch)

    def new_state(self, batch: int = 1) -> Seen:
        return Seen(batch)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Seen) -> Tensor:
        assert set(counts_B.tolist()) == {tokens_BS.shape[1]}
        for row, tokens in zip(cache.rows, tokens_BS.tolist(), strict=True):
            row += tokens
        return torch.stack([self.logits(row) for row in cache.rows])

    def advance(self, tokens_BS: Tensor, state: Seen) -> tuple[Tensor, Seen]:
        steps = [
            self.prefill(tokens_BS[:, i : i + 1], torch.ones(len(tokens_BS)), state) for i in range(tokens_BS.shape[1])
        ]
        return torch.stack(steps, 1), state

    def logits(self, row: list[int]) -> Tensor:
        wrong = torch.rand((), generator=self.random) < self.spoil
        guess = int(torch.randint(self.vocabulary, (), generator=self.random))
        return F.one_hot(torch.tensor(guess if wrong else self.answer(row)), self.vocabulary).float()


class FirstFollower(Answering):
    """What came after the first of such tokens: all that the symbolic tasks ask for."""

    def answer(self, row: list[int]) -> int:
        place = row.index(row[-1])
        return row[place + 1] if place + 1 < len(row) else 0


class NeedleReader(Answering):
    def answer(self, row: list[int]) -> int:
        text = bytes(row).decode("ascii")
        found = re.search(r"The magic \w+ for (\w+) is (\w+)\. ", text)
        asked = re.search(r"What is the magic \w+ for (\w+)\? It is (\w*)$", text)
        if found is None or asked is None or found[1] != asked[1]:
            return 0
        return ord(found[2][len(asked[2])])


@pytest.mark.parametrize("task", [Mqar(questions=5), Needle()], ids=str)
def test_symbols_that_are_looked_up_are_all_right_and_guessed_ones_are_not(task: Recall) -> None:
    rows = evaluate(FirstFollower(), [task], [40, 91], samples=7, batch=3)
    assert [(row.length, row.accuracy) for row in rows] == [(40, 1.0), (91, 1.0)]
    assert {row.asked for row in rows} == {7 * (5 if isinstance(task, Mqar) else 3)}
    assert all(row.state_bytes == 8 * row.length and row.seconds > 0 for row in rows)
    assert all(row.accuracy < 0.15 for row in evaluate(FirstFollower(spoil=1.0), [task], [40, 91], 20))
    (half,) = evaluate(FirstFollower(spoil=0.5), [task], [40], 60)
    assert 0.3 < half.accuracy < 0.7


class Recorder(FirstFollower):
    """Keeps the texts it was given, and how many at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.texts: list[list[int]] = []

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Seen) -> Tensor:
        if not cache.rows[0]:
            self.batches.append(len(tokens_BS))
            self.texts += tokens_BS.tolist()
        return super().prefill(tokens_BS, counts_B, cache)


def test_the_samples_do_not_depend_on_the_batch() -> None:
    """A model whose state is a value reads pieces, and so more texts at a time where they are long."""
    asked: list[list[list[int]]] = []
    for batch, wanted in ((3, [3, 3, 1]), (None, [7])):
        model = Recorder()
        evaluate(model, [Needle()], [40], 7, batch)
        assert model.batches == wanted
        asked.append(model.texts)
    assert asked[0] == asked[1] and len({tuple(text) for text in asked[0]}) == 7
    assert [_at_once(Recorder(), length) for length in (512, 16_384, 2**20, 10**8)] == [128, 32, 16, 1]

    class Whole:
        new_cache = prefill = vocabulary = context = None

    whole: Any = Whole()
    assert [_at_once(whole, length) for length in (512, 16_384, 10**6)] == [128, 4, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_needles_that_are_read_are_all_right_and_one_wrong_letter_spoils_an_answer(kind: str) -> None:
    task, tokenizer = Passkey(kind), load_bytes()
    (row,) = evaluate(NeedleReader(), [task], [163], 5, 2, tokenizer=tokenizer)
    assert (row.task, row.accuracy, row.asked) == (kind, 1.0, 5)
    assert evaluate(NeedleReader(spoil=1.0), [task], [163], 5, tokenizer=tokenizer)[0].accuracy == 0

    class LastLetterWrong(NeedleReader):
        def answer(self, row: list[int]) -> int:
            said = bytes(row).decode("ascii").rpartition("It is ")[2]
            return 0 if len(said) == 6 else super().answer(row)

    assert evaluate(LastLetterWrong(), [task], [163], 5, tokenizer=tokenizer)[0].accuracy == 0


def test_a_broken_model_is_never_right() -> None:
    class Broken(FirstFollower):
        def logits(self, row: list[int]) -> Tensor:
            return super().logits(row) * torch.nan

    with pytest.warns(UserWarning, match="some logits of the model are not finite: those answers count as wrong"):
        assert evaluate(Broken(), [Needle()], [50], 4)[0].accuracy == 0


def test_the_samples_depend_on_the_seed_alone() -> None:
    asked: list[Tensor] = []

    class Noting(FirstFollower):
        def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Seen) -> Tensor:
            asked.append(tokens_BS)
            return super().prefill(tokens_BS, counts_B, cache)

    for seed in (1, 1, 2):
        evaluate(Noting(), [Needle()], [50], 2, seed=seed)
    first, again, other = asked[0], asked[len(asked) // 3], asked[2 * len(asked) // 3]
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_needle_in_tokens_is_the_same_story(kind: str) -> None:
    tokenizer = pair_tokenizer()
    size = tokenizer.get_vocab_size()
    sample = tokenized_sample(Passkey(kind), tokenizer, torch.Generator().manual_seed(3), 6, 331, size)
    assert sample.tokens_BS.shape == sample.targets_BS.shape == (6, 331)
    for tokens, targets in zip(sample.tokens_BS, sample.targets_BS, strict=True):
        assert tokens[0] == 0  # the token that begins a text
        asked = (targets != IGNORED).nonzero().flatten().tolist()
        assert asked == list(range(331 - len(asked), 331))
        answer = tokenizer.decode(targets[targets != IGNORED].tolist()).strip()
        text = tokenizer.decode([*tokens.tolist(), int(targets[-1])])
        assert len(answer) == 7 and text.endswith(f"? It is {answer}") and text.count(f" is {answer}. ") == 1


def memory_model(**options: Any) -> TitanModel:
    options = {"memory_chunk": 8, **options}
    return TitanModel(TitanConfig(23, 16, 2, 2, segment=8, attention_every=2, **options)).eval()


def decoder(context: int = 200) -> Decoder:
    return Decoder(DecoderConfig(23, 16, 2, 2, 24, context=context)).eval()


@pytest.mark.parametrize("make", [memory_model, decoder], ids=["memory", "decoder"])
def test_pieces_equal_the_whole_text(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    monkeypatch.setattr(reading_module, "PIECE", 32)
    tokens = torch.randint(23, (3, 109))
    with torch.no_grad():
        whole = model(tokens)
        parts = list(pieces(model, tokens))
    assert [begin for begin, _, _ in parts] == [0, 32, 64, 96]
    torch.testing.assert_close(torch.cat([logits for _, logits, _ in parts], 1), whole, atol=2e-5, rtol=1e-4)
    for first in (7, 90):  # anywhere, and at the end alone
        asked = torch.zeros(3, 109, dtype=torch.bool)
        asked[:, first:] = torch.rand(3, 109 - first) < 0.5
        asked[1, first] = True
        assert torch.equal(predict(model, tokens, asked).tokens, whole.argmax(-1)[asked])


def test_logits_of_a_piece_fit_in_memory_whatever_the_vocabulary() -> None:
    for batch, vocabulary in ((1, 256), (64, 256), (1, 128_256), (64, 50_304)):
        size = reading_module.piece_size(batch, vocabulary)
        assert size & (size - 1) == 0 and (size == 16 or size * batch * vocabulary <= 2**26)
        assert size <= 2048


def test_the_state_grows_in_a_decoder_and_not_in_a_memory_model() -> None:
    task = Mqar(symbols=20, pairs=3, questions=4)

    def held(model: Any) -> list[int]:
        return [row.state_bytes for row in evaluate(model, [task], [30, 150], 2)]

    model = memory_model(memory_slots=4)
    short, long = held(model)
    assert short == long == model.new_state(1).bytes
    short, long = held(decoder())
    assert long > 2 * short
    assert long == decoder().new_cache(1, 150).bytes


class Hoarding(TitanModel):
    """Remembers one more number for every piece of a text."""

    def advance(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        logits, after = super().advance(tokens_BS, replace(state, position_B=state.position_B[..., -1]))
        seen_BN = state.position_B.view(len(tokens_BS), -1)
        return logits, replace(after, position_B=torch.cat([seen_BN, after.position_B[:, None]], 1))

    def new_state(self, batch: int = 1) -> MemoryState:
        state = super().new_state(batch)
        return replace(state, position_B=state.position_B[:, None])


def test_a_state_that_grows_is_seen_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is measured after the text was read; a fresh state would be as small for any text."""
    monkeypatch.setattr(reading_module, "PIECE", 16)
    model = Hoarding(TitanConfig(23, 16, 2, 2, segment=8, attention_every=2, memory_chunk=8)).eval()
    task = Mqar(symbols=20, pairs=3, questions=30)
    short, long = (row.state_bytes for row in evaluate(model, [task], [96, 192], 3, batch=2))
    assert long - short == 8 * (192 - 96) // 16


@pytest.mark.parametrize("make", [memory_model, decoder], ids=["memory", "decoder"])
def test_loss_by_position_is_the_mean_of_its_positions(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(reading_module, "PIECE", 16)
    text = torch.randint(23, (431,)).tolist()
    rows = loss_by_position(model, text, 140, samples=9)
    assert [(row.first, row.last) for row in rows] == [(1, 64), (65, 128), (129, 140)]
    assert [row.tokens for row in rows] == [3 * 64, 3 * 64, 3 * 12]  # three whole rows
    inputs, targets = torch.tensor(text[:420]).view(3, 140), torch.tensor(text[1:421]).view(3, 140)
    with torch.no_grad():
        losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    for row in rows:
        assert row.loss == pytest.approx(float(losses[:, row.first - 1 : row.last].mean()), rel=1e-4)
    (only,) = loss_by_position(model, text[:20], 140)
    assert (only.first, only.last, only.tokens) == (1, 19, 19)
    assert len(loss_by_position(model, text, 10, samples=2)) == 1


def test_uniform_logits_lose_the_logarithm_of_the_vocabulary() -> None:
    class Uniform(nn.Module):
        vocabulary, context = 11, None

        def new_state(self, batch: int = 1) -> None:
            return None

        def advance(self, tokens_BS: Tensor, state: None) -> tuple[Tensor, None]:
            return torch.zeros(*tokens_BS.shape, 11), None

    rows = loss_by_position(Uniform(), [1, 2, 3] * 50, 149)
    assert all(row.loss == pytest.approx(math.log(11)) for row in rows)


def test_tasks_are_written_and_found_again() -> None:
    for task in (Mqar(symbols=30, pairs=2), Needle(keys=2), Passkey("word", 5)):
        assert task_in({"recall": describe(task), "model_type": "x"}) == task
    assert [describe(make_task(name))["task"] for name in NAMES] == list(NAMES)
    assert task_in({"model_type": "x"}) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": [300]}, "a text of 300 tokens is longer than the model's context of 200"),
        ({"lengths": [0]}, "lengths must be at least 1 token"),
        (
            {"lengths": [40, 10**20]},
            r"a text of 100,000,000,000,000,000,000 tokens takes at least .*, and only .*B are free\.",
        ),
        ({"samples": 0}, "samples must be at least 1"),
        ({"batch": -3}, "batch must be at least 1, not -3"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"seed": 10**23}, f"seed must be a whole number from 0 to {2**63 - 1}, not {10**23}"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"tasks": [Passkey()]}, "the task passkey needs a tokenizer, and the model has no tokenizer.json"),
        ({"tasks": [Mqar()]}, "mqar has 64 symbols, and the model's vocabulary is 23"),
        ({"tasks": [Passkey()], "tokenizer": load_bytes()}, "a needle and its question need"),
        ({"tasks": [Passkey()], "lengths": [180], "tokenizer": load_bytes()}, "vocabulary of 23"),
    ],
)
def test_bad_arguments_raise_first(arguments: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"tasks": [Mqar(symbols=20, pairs=3, questions=4)], "lengths": [40], "samples": 2}
    with pytest.raises(ModelError, match=said):
        evaluate(decoder(), **(asked | arguments))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_task("uuid"), "unknown recall task 'uuid': use one of mqar, needle, passkey, number, word"),
        (lambda: make_task("mqar", {"keys": 3}), "unknown key 'keys' of the recall task mqar"),
        (lambda: make_task("mqar", {"pairs": "3"}), "pairs = '3' of the recall task mqar must be a whole number"),
        (lambda: make_task("mqar", {"pairs": 40}), "64 symbols give only 31 keys"),
        (
            lambda: make_task("word", {"answer_bytes": 0}),
            "answer_bytes = 0 of the recall task word must be",
        ),
        (lambda: task_in({"recall": "mqar"}), "recall must be an object with the name of a recall task"),
        (lambda: loss_by_position(decoder(), [1], 9), "fewer than 2 tokens"),
        (lambda: loss_by_position(decoder(), [1, 23], 9), "token 23, which is outside the model's vocabulary of 23"),
    ],
)
def test_invalid_tasks_and_texts_raise(make: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [memory_model, decoder], ids=["memory", "decoder"])
def test_a_gpu_says_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 32)
    # Chunks that the kernels take.
    model = make(memory_chunk=16) if make is memory_model else make()
    task, text = Mqar(symbols=20, pairs=3, questions=4), torch.randint(23, (431,)).tolist()
    on_cpu = loss_by_position(model, text, 140)
    model = model.to("cuda")
    on_gpu = loss_by_position(model, text, 140, device="cuda")
    assert [row.loss for row in on_gpu] == pytest.approx([row.loss for row in on_cpu], rel=2e-3)
    for dtype in (torch.float32, torch.bfloat16):
        rows = evaluate(model.to(dtype), [task], [64, 150], 5, device="cuda")
        assert [row.asked for row in rows] == [20, 20] and all(0 <= row.accuracy <= 1 for row in rows)
