"""On a GPU: the recorded step writes what the unrecorded one writes, under every plan, and nobody waits inside it."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from redline.errors import ModelError
from redline.generation import SamplingOptions as Sampling
from redline.generation.static_batch import StaticBatchEngine
from redline.generation.static_batch.sampling import Sampler
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
    plain = StaticBatchEngine(model, plan, graph=False).generate(batch, sampling, max_tokens=100)
    engine = StaticBatchEngine(model, plan)
    assert engine.generate(batch, sampling, max_tokens=100) == plain
    # Another text through the same recording, then the first again.
    engine.generate(prompts(2, 160, 60), replace(sampling, seed=8), max_tokens=100)
    assert engine.setup_s == 0
    assert engine.generate(batch, sampling, max_tokens=100) == plain and engine.setup_s == 0


@pytest.mark.parametrize("plan", ["", "fused_ops"])
def test_windows_wrap_in_a_recorded_step(plan: str) -> None:
    config = DecoderConfig(1003, 128, 2, 4, 256, key_value_heads=2, context=700, windows=(17, None))
    model = Decoder(config).eval().cuda().bfloat16()
    batch = prompts(30, 5)
    plain = StaticBatchEngine(model, plan, graph=False).generate(batch, max_tokens=80)
    assert StaticBatchEngine(model, plan).generate(batch, max_tokens=80) == plain


@pytest.mark.filterwarnings("ignore")  # the compiler's own, where it meets flex attention
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_a_memory_model_is_recorded_too(update: str) -> None:
    """Segments end inside the recorded steps: slots are filled and states carried by what was recorded once."""
    config = TitanConfig(1003, 128, 4, 4, attention_every=2, segment=32, memory_slots=8, memory_update=update)
    model = TitanModel(config).eval().cuda()
    batch = prompts(40, 3, 75)
    plain = StaticBatchEngine(model, graph=False).generate(batch, max_tokens=80)
    engine = StaticBatchEngine(model)
    for _ in range(2):
        assert engine.generate(batch, max_tokens=80) == plain
    assert engine.setup_s == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["", "fused_ops"])
@pytest.mark.parametrize("slots", [0, 24])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_pieces_of_a_long_prompt_are_recorded_too(update: str, slots: int, plan: str) -> None:
    config = TitanConfig(1003, 128, 4, 4, attention_every=2, segment=32, memory_slots=slots, memory_update=update)
    model = TitanModel(config).eval().cuda().bfloat16()
    plain = StaticBatchEngine(model, plan, graph=False, chunk=64)
    engine = StaticBatchEngine(model, plan, chunk=64)
    # The second is shorter, and read by what the first was worth recording for.
    for batch in (prompts(64 * 9 + 5, 64 * 11), prompts(150, 64)):
        assert engine.generate(batch, max_tokens=20) == plain.generate(batch, max_tokens=20)
        assert engine._idle is not None and engine._idle[1]._piece is not None


@torch.no_grad()
def test_the_gpu_samples_the_same_tokens_as_the_cpu(model: Decoder) -> None:
    exact = Decoder(model.config).eval()
    exact.load_state_dict({name: tensor.float().cpu() for name, tensor in model.state_dict().items()})
    tokens, counts = torch.randint(1003, (2, 90)), torch.tensor([90, 33])
    for implementation in ("reference", "auto"):
        engine = StaticBatchEngine(model, "" if implementation == "reference" else "fused_ops")
        caches = exact.new_cache(2, 128), engine.model.new_cache(2, 128)
        logits = (
            exact.prefill(tokens, counts, caches[0]),
            engine.model.prefill(tokens.cuda(), counts.cuda(), caches[1]).cpu().float(),
        )
        limit = 1e-3 if model.norm.weight.dtype == torch.float32 else 0.05
        for _ in range(5):
            assert (logits[0] - logits[1]).norm() < limit * logits[0].norm()
            new = torch.randint(1003, (2,))
            logits = (exact.step(new, caches[0]), engine.model.step(new.cuda(), caches[1]).cpu().float())


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
    recorded, plain = StaticBatchEngine(model, plan), StaticBatchEngine(model, plan, graph=False)
    assert recorded.generate(batch, max_tokens=40) == plain.generate(batch, max_tokens=40)
    assert all(recorded.model.proofs().values())


def test_recordings_follow_each_other() -> None:
    """Another form takes the place of the last: its memory is given back, and none of it is recorded into."""
    config = DecoderConfig(1003, 128, 1, 4, 256, context=700)
    model = Decoder(config).eval().cuda().bfloat16()
    engine, plain = StaticBatchEngine(model, "fused_ops"), StaticBatchEngine(model, "fused_ops", graph=False)
    for lengths in ((3,), (5, 9), (400,), (2, 2, 2), (3,)):
        batch = prompts(*lengths)
        assert engine.generate(batch, max_tokens=20) == plain.generate(batch, max_tokens=20)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
def test_a_recorded_step_that_is_not_finite_is_no_text(sampling: Sampling) -> None:
    """The steps that are under way by then take in a token all the same, and must not stop the device."""
    model = Decoder(DecoderConfig(1003, 128, 1, 4, 256, context=700)).eval().cuda()
    batch = prompts(5, 9)
    engine = StaticBatchEngine(model)
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
    cache = model.new_cache(2, 64)
    tokens = torch.zeros(2, dtype=torch.long, device="cuda")
    sampler = Sampler(WARM, 2, 1003, torch.device("cuda"))
    with torch.no_grad():
        sampler.next_tokens(model.step(tokens, cache))
        with waits_for_nobody():
            sampler.next_tokens(model.step(tokens, cache))


def test_the_same_seed_draws_the_same_on_both_devices() -> None:
    logits = torch.randn(3, 5000)
    draws = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(Sampling(temperature=1.0, seed=6), 3, 5000, torch.device(device))
        draws.append([sampler.next_tokens(logits.to(device)).tolist() for _ in range(50)])
    same = sum(one == other for one, other in zip(*draws, strict=True))
    # Logarithms differ in the last bit, which can swap two tokens that are nearly equal.
    assert same >= 48
