"""On a GPU: the recorded step writes what the unrecorded one writes, under every plan, and nobody waits inside it."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from msgspec.structs import replace

from redline.errors import ModelError
from redline.generation import Engine, InferenceEngine
from redline.generation import SamplingOptions as Sampling
from redline.generation.request import Finish, Request
from redline.generation.sampler import Sampler
from redline.generation.sequence import Sequence
from redline.generation.step_plan import PlannedRow
from redline.models.decoder import Decoder, DecoderConfig
from redline.models.memory import TitanConfig, TitanModel

pytestmark = pytest.mark.gpu
WARM = Sampling(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.2, seed=3)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> Decoder:
    config = DecoderConfig(1003, 256, 3, 8, 512, key_value_heads=2, context=700, query_key_norm=True)
    model = Decoder(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to("cuda", request.param)


def prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(1003) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("plan", ["", "fused_ops"])
def test_a_recorded_step_writes_the_same_text(plan: str, sampling: Sampling, model: Decoder) -> None:
    batch = prompts(40, 3, 161)
    plain = InferenceEngine(model, plan, graph=False).generate(batch, sampling, max_tokens=100)
    engine = InferenceEngine(model, plan)
    assert engine.generate(batch, sampling, max_tokens=100) == plain
    # Another text through the same recordings, then the first again.
    engine.generate(prompts(2, 160, 60), replace(sampling, seed=8), max_tokens=100)
    before = engine.setup_s
    assert engine.generate(batch, sampling, max_tokens=100) == plain and engine.setup_s == before


@pytest.mark.parametrize("plan", ["", "fused_ops"])
def test_windows_wrap_in_a_recorded_step(plan: str) -> None:
    config = DecoderConfig(1003, 128, 2, 4, 256, key_value_heads=2, context=700, windows=(17, None))
    model = Decoder(config).eval().cuda().bfloat16()
    batch = prompts(30, 5)
    plain = InferenceEngine(model, plan, graph=False).generate(batch, max_tokens=80)
    assert InferenceEngine(model, plan).generate(batch, max_tokens=80) == plain


@pytest.mark.filterwarnings("ignore")  # the compiler's own, where it meets flex attention
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_a_memory_model_is_recorded_too(update: str) -> None:
    """Segments end inside the recorded steps: slots are filled and states carried by what was recorded once."""
    config = TitanConfig(1003, 128, 4, 4, attention_every=2, segment=32, memory_slots=8, memory_update=update)
    model = TitanModel(config).eval().cuda()
    batch = prompts(40, 3, 75)
    plain = InferenceEngine(model, graph=False).generate(batch, max_tokens=80)
    engine = InferenceEngine(model)
    assert engine.generate(batch, max_tokens=80) == plain
    before = engine.setup_s
    assert engine.generate(batch, max_tokens=80) == plain and engine.setup_s == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["", "fused_ops"])
@pytest.mark.parametrize("slots", [0, 24])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_pieces_of_a_long_prompt_are_recorded_too(update: str, slots: int, plan: str) -> None:
    config = TitanConfig(1003, 128, 4, 4, attention_every=2, segment=32, memory_slots=slots, memory_update=update)
    model = TitanModel(config).eval().cuda().bfloat16()
    plain = InferenceEngine(model, plan, graph=False, chunk=64)
    engine = InferenceEngine(model, plan, chunk=64)
    # The second is shorter, and read by what the first was worth recording for.
    for batch in (prompts(64 * 9 + 5, 64 * 11), prompts(150, 64)):
        assert engine.generate(batch, max_tokens=20) == plain.generate(batch, max_tokens=20)
        assert engine.engine._runner._piece is not None


@torch.no_grad()
@pytest.mark.parametrize("plan", ["", "fused_ops"])
def test_log_probabilities_on_the_gpu_are_those_of_the_cpu(plan: str, model: Decoder) -> None:
    """Of prompts in chunks, tokens after them, and shared prefixes, whose tokens the CPU reads as one text."""
    exact = Decoder(model.config).eval()
    exact.load_state_dict({name: tensor.float().cpu() for name, tensor in model.state_dict().items()})
    engine = Engine(model, plan, chunk=64, block_size=16)
    head = prompts(50)[0]
    batch = [Request(str(row), head[: 25 * row] + prompts(40 + 70 * row)[0], 30, logprobs=0) for row in range(3)]
    for request in batch:
        engine.submit(request)
    found: dict[str, list[tuple[int, float]]] = {request.id: [] for request in batch}
    while engine.has_work:
        for output in engine.step():
            found[output.id] += [(one.token, one.logprob) for one in output.logprobs or ()]
    limit = 1e-3 if model.norm.weight.dtype == torch.float32 else 0.15
    for request in batch:
        tokens = [token for token, _ in found[request.id]]
        expected = exact(torch.tensor([[*request.prompt, *tokens]])).log_softmax(-1)[0, len(request.prompt) - 1 :]
        for (token, logprob), row in zip(found[request.id], expected, strict=False):
            assert abs(row[token].item() - logprob) < limit


@pytest.mark.parametrize(
    "plan",
    [
        "compile(fullgraph=true)",
        "fused_ops + compile(fullgraph=true)",
        "int8 + compile",
        "fused_ops + int8",
        "fp8 + compile",
        "fused_ops + fp8(mode=weight_only)",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled_and_quantized_steps_are_recorded_too(plan: str) -> None:
    config = DecoderConfig(1008, 256, 2, 4, 512, key_value_heads=2, context=300)
    model = Decoder(config).eval().cuda().bfloat16()
    batch = prompts(20, 7)
    recorded, plain = InferenceEngine(model, plan), InferenceEngine(model, plan, graph=False)
    assert recorded.generate(batch, max_tokens=40) == plain.generate(batch, max_tokens=40)
    assert all(recorded.model.proofs().values())


def test_recordings_follow_each_other() -> None:
    """Another form takes the place of the last: its memory is given back, and none of it is recorded into."""
    config = DecoderConfig(1003, 128, 1, 4, 256, context=700)
    model = Decoder(config).eval().cuda().bfloat16()
    engine, plain = InferenceEngine(model, "fused_ops"), InferenceEngine(model, "fused_ops", graph=False)
    for lengths in ((3,), (5, 9), (400,), (2, 2, 2), (3,)):
        batch = prompts(*lengths)
        assert engine.generate(batch, max_tokens=20) == plain.generate(batch, max_tokens=20)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
def test_a_recorded_step_that_is_not_finite_is_no_text(sampling: Sampling) -> None:
    """The steps that are under way by then take in a token all the same, and must not stop the device."""
    model = Decoder(DecoderConfig(1003, 128, 1, 4, 256, context=700)).eval().cuda()
    batch = prompts(5, 9)
    engine = InferenceEngine(model)
    whole = engine.generate(batch, sampling, max_tokens=20)
    shared = engine.model.model.head.weight
    kept = shared.detach().clone()
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            shared.fill_(value)
        with pytest.raises(ModelError, match="not finite in rows 0, 1"):
            engine.generate(batch, sampling, max_tokens=20)
        with torch.no_grad():
            shared.copy_(kept)
        assert engine.generate(batch, sampling, max_tokens=20) == whole


def test_a_step_does_not_wait_for_the_device(
    model: Decoder, waits_for_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    """Planning and launching; only the result of the step before is waited for."""
    engine = Engine(model, "fused_ops", token_budget=512)
    for row, prompt in enumerate(prompts(20, 300, 40)):
        engine.submit(Request(str(row), prompt, 300, replace(WARM, seed=row)))
    for _ in range(8):
        engine.step()
    for _ in range(5):
        plan = engine.scheduler.plan()
        with waits_for_nobody():
            readback = engine._runner.launch(plan, [None] * len(plan.rows))
        engine._in_flight.append((plan, readback))
        before, readback = engine._in_flight.popleft()
        engine._settle(before, readback.read())


def test_the_same_seed_draws_the_same_on_both_devices() -> None:
    logits = torch.randn(3, 5000)
    draws = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(3, 5000, torch.device(device))
        sequences = []
        for row in range(3):
            request = Request(str(row), [0], 50, Sampling(temperature=1.0, seed=6 + row))
            sequences.append(Sequence(request, row, 50, Finish.LENGTH))
            sampler.admit(row, request.sampling, [0], [])
        found = []
        for drawn in range(50):
            entries = [PlannedRow(one, row, 0, 1, 1, drawn) for row, one in enumerate(sequences)]
            found.append(sampler.sample(logits.to(device), entries, [None] * 3).tokens_N.tolist())
        draws.append(found)
    same = sum(one == other for one, other in zip(*draws, strict=True))
    # Logarithms differ in the last bit, which can swap two tokens that are nearly equal.
    assert same >= 48


@pytest.mark.parametrize("behind", [0, 1])
def test_a_small_pool_preempts_and_writes_the_same_texts(behind: int, model: Decoder) -> None:
    batch = prompts(100, 30, 160, 5, 90)
    expected = InferenceEngine(model.float(), graph=False).generate(batch, max_tokens=60)
    small = InferenceEngine(model, blocks=20, block_size=16, behind=behind, drafts=4)
    assert small.generate(batch, max_tokens=60) == expected
    assert small.engine.stats().preemptions > 0
