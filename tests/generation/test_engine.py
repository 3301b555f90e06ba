"""Texts of the engine against the model asked token by token, against transformers, and against themselves."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from redline.errors import MachineError, ModelError, RedlineError
from redline.generation import InferenceEngine
from redline.generation import SamplingOptions as Sampling
from redline.generation.planned import without_graphs
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.models.decoder import Decoder, load_decoder
from redline.models.memory import TitanModel

from .conftest import FakeRecorder

WARM = Sampling(temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.3, seed=11)


def prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(101) for _ in range(length)] for length in lengths]


@torch.no_grad()
def one_by_one(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.cpu
@pytest.mark.parametrize(("chunk", "recorded"), [(1, False), (7, True), (64, False), (64, True)])
def test_greedy_texts_are_the_models_own(chunk: int, recorded: bool, model: Decoder) -> None:
    batch = prompts(3, 31, 1, 14)
    recorder = FakeRecorder() if recorded else None
    found = InferenceEngine(model, chunk=chunk, recorder=recorder).generate(batch, max_tokens=25)
    for prompt, completion in zip(batch, found, strict=True):
        assert completion.tokens == one_by_one(model, prompt, 25) and completion.reason == "length"
    if recorder is not None:
        # Rows whose prompts end at different steps decode in numbers of rows of their own.
        assert 2 <= recorder.recorded <= 5 and recorder.replayed >= 25


def test_a_memory_model_generates_what_its_forward_predicts(memory_model: TitanModel) -> None:
    batch = prompts(3, 31, 1)
    expected = [one_by_one(memory_model, prompt, 20) for prompt in batch]
    for recorder in (None, FakeRecorder()):
        engine = InferenceEngine(memory_model, chunk=10, recorder=recorder)
        for _ in range(2):
            assert [completion.tokens for completion in engine.generate(batch, max_tokens=20)] == expected


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_greedy_texts_are_those_of_transformers(family: str, tmp_path: Any) -> None:
    import transformers

    window = {"Mistral": {"sliding_window": 8}}.get(family, {})
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 120}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **window, eos_token_id=None)
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    oracle.save_pretrained(tmp_path)
    oracle.double()
    batch = prompts(5, 23)
    found = InferenceEngine(load_decoder(tmp_path).double()).generate(batch, max_tokens=48)
    for prompt, completion in zip(batch, found, strict=True):
        text = oracle.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
        assert completion.tokens == text[len(prompt) :]
    # One row in fifty of such models says one word for ever.
    assert len({token for completion in found for token in completion.tokens}) > 1


@pytest.mark.cpu
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, seed=3), WARM], ids=["plain", "all"])
def test_a_row_does_not_depend_on_the_batch(sampling: Sampling, model: Decoder) -> None:
    batch = prompts(4, 19, 11)
    engine = InferenceEngine(model, chunk=8)
    together = engine.generate(batch, sampling, max_tokens=30)
    for row, prompt in enumerate(batch):
        (alone,) = engine.generate([prompt], replace(sampling, seed=sampling.seed + row), max_tokens=30)
        assert alone.tokens == together[row].tokens
    assert engine.generate(batch, sampling, max_tokens=30) == together
    assert engine.generate(batch, replace(sampling, seed=99), max_tokens=30) != together


def test_a_recorded_step_follows_settings_and_leaves_nothing_behind(model: Decoder) -> None:
    batch, recorder = prompts(6, 2), FakeRecorder()
    engine, plain = InferenceEngine(model, recorder=recorder), InferenceEngine(model)
    for sampling in (WARM, replace(WARM, temperature=0.7, top_p=0.5, seed=8, repetition_penalty=2.0), WARM):
        assert engine.generate(batch, sampling, max_tokens=20) == plain.generate(batch, sampling, max_tokens=20)
    before = engine.setup_s
    engine.generate(batch, max_tokens=20)
    # The step of the prompts, and the others; sampling is not part of them.
    assert recorder.recorded == 2 and engine.setup_s == before > 0


def test_stop_tokens_end_a_row_and_not_the_others(model: Decoder) -> None:
    batch = prompts(9, 10)
    free = [completion.tokens for completion in InferenceEngine(model).generate(batch, max_tokens=30)]
    stop = next(token for token in free[0][3:] if token not in free[1] and token not in free[0][:3])
    at = free[0].index(stop)
    with InferenceEngine(model).stream(batch, max_tokens=30, stop_tokens=[stop]) as stream:
        seen = list(stream)
    first, second = stream.completions
    assert (first.tokens, first.reason) == (free[0][:at], "stop")
    assert (second.tokens, second.reason) == (free[1], "length")
    assert [row[0] for row in seen] == free[0][:at] + [None] * (30 - at)
    assert [row[1] for row in seen] == free[1]
    assert len(stream.step_s) == 29 and stream.prefill_s > 0


def test_a_stream_may_be_closed_early_and_run_beside_others(model: Decoder) -> None:
    engine = InferenceEngine(model)
    (a, b), whole = prompts(5, 7), 20
    expected = [engine.generate([prompt], max_tokens=whole)[0].tokens for prompt in (a, b)]
    first, second = engine.stream([a], max_tokens=whole), engine.stream([b], max_tokens=whole)
    found: list[list[int]] = [[], []]
    for _ in range(whole):
        found[0] += [token for token in next(first) if token is not None]
        found[1] += [token for token in next(second) if token is not None]
    assert found == expected
    with engine.stream([a], max_tokens=whole) as left:
        next(left)
    assert engine.generate([b], max_tokens=whole)[0].tokens == expected[1]


def test_the_context_ends_a_text(model: Decoder) -> None:
    (completion,) = InferenceEngine(model).generate(prompts(100), max_tokens=50)
    assert (len(completion.tokens), completion.reason) == (20, "context")
    with pytest.raises(RedlineError, match="the prompt has 120 tokens, and the model's context is 120"):
        InferenceEngine(model).generate(prompts(120))


def test_the_context_of_a_row_ends_no_other_row(model: Decoder) -> None:
    short, long = prompts(3, 115)
    (alone,) = InferenceEngine(model).generate([short], max_tokens=40)
    together = InferenceEngine(model).generate([short, long], max_tokens=40)
    assert [(len(row.tokens), row.reason) for row in together] == [(40, "length"), (5, "context")]
    assert together[0] == alone


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ([], {}, "at least one token"),
        ([[1], []], {}, "at least one token"),
        ([[1, 101]], {}, "token 101 is not in the model's vocabulary of 101"),
        ([[1]], {"max_tokens": 0}, "at least 1 token"),
    ],
)
def test_bad_arguments_raise(batch: list[list[int]], options: dict[str, int], words: str, model: Decoder) -> None:
    with pytest.raises(RedlineError, match=words):
        InferenceEngine(model).generate(batch, **options)


def test_impossible_engines_raise(model: Decoder) -> None:
    with pytest.raises(MachineError, match="needs a CUDA device"):
        InferenceEngine(model, graph=True)
    with pytest.raises(RedlineError, match="chunk must be at least 1 token"):
        InferenceEngine(model, chunk=0)


@pytest.mark.cpu
def test_a_plan_is_one_argument(model: Decoder) -> None:
    model.float()  # torchao quantizes no fp64
    (prompt,) = prompts(12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = InferenceEngine(model, "fused_ops + int8(min_features=16)")
    (completion,) = engine.generate([prompt], max_tokens=12)
    assert len(completion.tokens) == 12
    proofs = engine.model.proofs()
    assert "9 of 9 linear layers hold int8 weights" in proofs["int8(min_features=16)"]
    with torch.no_grad():
        exact, rounded = (
            one.prefill(torch.tensor([[5]]), torch.tensor([1]), one.new_cache(1, 4))
            for one in (InferenceEngine(model).model, engine.model)
        )
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shared = InferenceEngine(model, "int8(min_features=16)", share=True)
    assert shared.model.model is model


def test_a_model_that_is_not_shared_stays_as_it_is(model: Decoder) -> None:
    model.train()
    engine = InferenceEngine(model)
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in engine.model.model.modules())


@pytest.fixture
def any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether fp16 is emulated here, and known to be, is not what is asked."""
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")


@pytest.mark.cpu
def test_rungs_that_need_samples_get_prompts(model: Decoder, any_precision: None) -> None:
    (prompt,) = prompts(12)
    with pytest.raises(RedlineError, match="needs real inputs: pass samples="):
        InferenceEngine(model, "fp16")
    with pytest.raises(RedlineError, match="token 101 is not in the model's vocabulary"):
        InferenceEngine(model, "fp16", samples=[[1, 101]])
    with pytest.raises(RedlineError, match="at least one token"):
        InferenceEngine(model, "fp16", samples=[[]])
    samples = [[1, 2, 3], torch.tensor([4, 5])]
    engine = InferenceEngine(model, "fp16", samples=samples)
    assert str(engine.plan) == "fp16" and engine.model.model.head.weight.dtype == torch.float16
    assert "nothing overflowed on 2 sample(s)" in engine.model.proofs()["fp16"]
    assert len(engine.generate([prompt], max_tokens=12)[0].tokens) == 12


def test_the_plan_is_the_one_that_was_applied(model: Decoder, any_precision: None) -> None:
    with torch.no_grad():
        model.blocks[0].get_parameter("mlp.down.weight").mul_(1e6)
    with pytest.warns(UserWarning, match="falls back to bf16"):
        engine = InferenceEngine(model, "fp16", samples=[[1, 2, 3]])
    assert str(engine.plan) == "bf16" and list(engine.model.proofs()) == ["bf16"]


def test_graphs_of_a_plan_become_the_engines_own() -> None:
    plan = Plan.parse("fused_ops + compile + cuda_graph(limit=2)")
    assert str(without_graphs(plan)) == "fused_ops + compile"
    plan = Plan.parse("fused_ops + compile(mode=max-autotune)")
    assert str(without_graphs(plan)) == "fused_ops + compile(mode=max-autotune-no-cudagraphs)"


@pytest.mark.slow
def test_a_compiled_step_writes_the_same_text(model: Decoder, without_warnings: None) -> None:
    batch = prompts(6, 9)
    engine = InferenceEngine(model, "compile(fullgraph=true)")
    assert engine.generate(batch, max_tokens=12) == InferenceEngine(model).generate(batch, max_tokens=12)
    assert "no graph break" in engine.model.proofs()["compile(fullgraph=true)"]


class Recurrent(nn.Module):
    """The smallest other kind of model: a decayed sum of embeddings, of any length."""

    vocabulary, context = 101, None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 16)

    class State:
        def __init__(self, batch: int) -> None:
            self.sum_BW = torch.zeros(batch, 16)

        @property
        def bytes(self) -> int:
            return self.sum_BW.nbytes

        def gather(self, rows: list[int]) -> Any:
            part = type(self)(len(rows))
            part.sum_BW.copy_(self.sum_BW[rows])
            return part

        def scatter(self, rows: list[int], part: Any) -> None:
            self.sum_BW[rows] = part.sum_BW[: len(rows)]

    def new_cache(self, batch: int, length: int) -> "Recurrent.State":
        return self.State(batch)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: "Recurrent.State") -> Tensor:
        for index in range(tokens_BS.shape[1]):
            new = cache.sum_BW * 0.8 + self.embedding(tokens_BS[:, index])
            cache.sum_BW.copy_(torch.where((index < counts_B)[:, None], new, cache.sum_BW))
        return cache.sum_BW @ self.embedding.weight.T

    def prepare(self, cache: Any) -> None:
        pass

    def step(self, tokens_B: Tensor, cache: "Recurrent.State") -> Tensor:
        cache.sum_BW.mul_(0.8).add_(self.embedding(tokens_B))
        return cache.sum_BW @ self.embedding.weight.T


def test_another_kind_of_model_and_no_limit_of_length() -> None:
    model, batch = Recurrent(), prompts(300, 2, 17)
    engine = InferenceEngine(model, chunk=64, recorder=FakeRecorder())
    sampling = Sampling(temperature=3.0, seed=5)
    together = engine.generate(batch, sampling, max_tokens=300)
    for row, prompt in enumerate(batch):
        alone = InferenceEngine(model).generate([prompt], replace(sampling, seed=5 + row), max_tokens=300)
        assert alone == [together[row]]


class Breaking(Recurrent):
    """Its second row's logits are `value` from the fourth token on."""

    value = float("nan")

    class State(Recurrent.State):
        def __init__(self, batch: int) -> None:
            super().__init__(batch)
            self.steps_B = torch.zeros(batch)

        def gather(self, rows: list[int]) -> Any:
            part = super().gather(rows)
            part.steps_B.copy_(self.steps_B[rows])
            return part

        def scatter(self, rows: list[int], part: Any) -> None:
            super().scatter(rows, part)
            self.steps_B[rows] = part.steps_B[: len(rows)]

    def step(self, tokens_B: Tensor, cache: Any) -> Tensor:
        cache.steps_B.add_(1)
        logits = super().step(tokens_B, cache)
        breaks = ((torch.arange(len(logits)) == 1) & (cache.steps_B >= 3))[:, None]
        return torch.where(breaks, self.value, logits)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_no_text(value: float, sampling: Sampling, recorded: bool) -> None:
    model = Breaking()
    model.value = value
    engine = InferenceEngine(model, recorder=FakeRecorder() if recorded else None)
    stream = engine.stream(prompts(4, 2, 3), sampling, max_tokens=9)
    assert all(token is not None for _ in range(3) for token in next(stream))
    with pytest.raises(ModelError, match=r"logits are not finite in row 1: the weights .* bf16 or fp32\)\.$"):
        next(stream)
    assert [len(row.tokens) for row in stream.completions] == [3, 3, 3]
    # Alone it has no second row.
    assert len(engine.generate(prompts(2), sampling, max_tokens=9)[0].tokens) == 9


def test_a_row_that_has_ended_may_break() -> None:
    sound, model, batch = Recurrent(), Breaking(), prompts(4, 2)
    model.load_state_dict(sound.state_dict())

    def texts(seed: int) -> list[list[int]]:
        free = InferenceEngine(sound).generate(batch, Sampling(temperature=100.0, seed=seed), max_tokens=9)
        return [completion.tokens for completion in free]

    seed = next(seed for seed in range(100) if texts(seed)[1][0] not in texts(seed)[0])
    whole, (stop, *_) = texts(seed)
    varied = Sampling(temperature=100.0, seed=seed)
    first, second = InferenceEngine(model).generate(batch, varied, max_tokens=9, stop_tokens=[stop])
    assert (first.tokens, first.reason) == (whole, "length")
    assert (second.tokens, second.reason) == ([], "stop")


def test_a_broken_text_leaves_nothing_behind(model: Decoder) -> None:
    with torch.no_grad():
        model.embedding.weight[7] = float("nan")
        model.head.weight[7] = 0
    whole = [1, 2, 3, 4]
    engine = InferenceEngine(model)
    expected = InferenceEngine(model).generate([whole], max_tokens=9)
    with pytest.raises(ModelError, match="logits are not finite: the weights"):
        engine.generate([[1, 2, 3, 4, 5, 7]], max_tokens=9)
    assert engine.generate([whole], max_tokens=9) == expected
    with pytest.raises(ModelError, match="not finite in rows 0, 2: the weights"):
        engine.generate([[7], [1], [2, 7]], max_tokens=9)
