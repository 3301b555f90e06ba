"""Compares the training speed of Redline's 124M decoder and Titans model with that of transformers on a GPU.

    python benchmarks/train_speed.py --out FILE [--length 2048 --rounds 3 --limit-s 90] [--only redline] [--plan PLAN]
        [--also "fastest kernels"]

A step is forward, backward, clipping and AdamW, on random tokens in bf16. Redline's arms run configs/decoder-124m.toml
as `redline train` does, with other plans: its task, its loss, its optimizer with fp32 master weights. The transformers
arms have the same shape and plain bf16 weights. Every row of a batch is one document in all arms. The number of tokens
per step is constant over lengths; a single row of 32K tokens measures memory. Arms are timed in turns of several steps.
MFU is relative to the bf16 matmul measured at the start; peaks include the weights. `--also` adds Redline arms with
nondeterministic kernels, fp8, or a slot bank. A failed arm has a row with the reason. Rows are written as they come.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import redline.training
from redline.files.atomic import write_text
from redline.ladder.search.run_log import command_line
from redline.models.decoder.hugging_face import write_config
from redline.nn.packing import Packing
from redline.training.optimizers import step_unless
from redline.training.text.architectures import DecoderSettings, MemorySettings
from redline.training.text.config import TextTraining
from redline.training.text.packing import Batch
from redline.training.text.task import LanguageTask

CONFIG = Path(redline.training.__file__).parent / "configs/decoder-124m.toml"
PLAN = "fused_ops + compile(regional=true)"
# Tokens per row and rows per batch.
SHAPES = ((2048, 32), (8192, 8), (32_768, 2), (32_768, 1))
TINY_SHAPES = ((64, 2), (96, 1))
TINY_VOCABULARY = 512
# The largest difference of the first loss to that of a uniform prediction; random weights predict nothing.
LARGEST_LOSS_ERROR = 0.5
STEPS_OF_A_TURN = 4
# The limit of recompilations of a block, over all arms.
COMPILATIONS_OF_A_BLOCK = 256
FASTEST, FP8, SLOTS = ALSO = ("fastest kernels", "fp8", "512 slots")
CUT_OFF = "the run was cut off before it was timed"


@dataclass(frozen=True)
class Race:
    """One shape of batch on one device."""

    length: int
    rows: int
    tiny: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def tokens(self) -> int:
        return self.length * self.rows

    def training(self, kind: str, plan: str, also: str = "") -> TextTraining:
        given = TextTraining.read(CONFIG)
        decoder = given.model
        assert isinstance(decoder, DecoderSettings)
        memory = MemorySettings(width=decoder.width, layers=decoder.layers, heads=decoder.heads)
        if self.tiny:
            decoder = replace(decoder, width=64, layers=2, heads=4, mlp_width=128)
            memory = replace(memory, width=64, layers=2, heads=4, attention_every=2, memory_chunk=16, segment=16)
            given = replace(given, tokenizer=replace(given.tokenizer, vocabulary=TINY_VOCABULARY))
        if also == SLOTS:
            memory = replace(memory, memory_slots=int(SLOTS.split()[0]))
        precision = "fp32" if self.tiny else "fp8" if also == FP8 else "bf16"
        return replace(
            given,
            kind=kind,
            model=memory if kind == "memory" else replace(decoder, context=self.length),
            data=replace(given.data, length=self.length, batch=self.rows),
            loop=replace(given.loop, plan=plan, precision=precision, deterministic=also != FASTEST),
        )

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()


@dataclass
class Arm:
    """`step` trains one step and returns the loss without synchronization; `later` returns facts known after it."""

    step: Callable[[int], Tensor]
    model: nn.Module
    flops_per_token: float
    about: dict[str, Any] = field(default_factory=dict)
    later: Callable[[], dict[str, Any]] = dict


class Drawn(LanguageTask):
    """A language task that trains on the batches that `draw` returns."""

    def __init__(self, training: TextTraining, device: torch.device, draw: Callable[[int], Batch]) -> None:
        self.draw = draw
        super().__init__(training, training.tokenizer.vocabulary, device)

    @property
    def data_identity(self) -> Mapping[str, Any]:
        return {}

    def save(self, model: nn.Module, folder: Path) -> None:
        raise NotImplementedError("the benchmark does not save models.")

    def _draw(self, step: int) -> Batch:
        return self.draw(step)


def random_tokens(step: int, rows: int, training: TextTraining) -> Tensor:
    random = torch.Generator().manual_seed(step)
    return torch.randint(training.tokenizer.vocabulary, (rows, training.data.length + 1), generator=random)


def ours(race: Race, kind: str, plan: str, also: str = "") -> Arm:
    training = race.training(kind, plan, also)

    def draw(step: int) -> Batch:
        """Returns rows of random tokens, one document each."""
        tokens = random_tokens(step, race.rows, training)
        return Batch(
            tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), Packing.of(torch.zeros_like(tokens[:, 1:]))
        )

    return arm_of(Drawn(training, race.device, draw))


def arm_of(task: LanguageTask) -> Arm:
    training, optimizer, arithmetic = task.training, task.optimizer(), task.arithmetic

    def step(index: int) -> Tensor:
        """Does a step of the training loop without its logging."""
        with task.around():
            loss = task.loss(index)
            arithmetic.backward(loss)
        overflowed = arithmetic.unscale(optimizer)
        norm = nn.utils.clip_grad_norm_(task.model.parameters(), training.loop.clip_norm)
        step_unless(~(loss.detach() + norm).isfinite() | overflowed, optimizer)
        optimizer.zero_grad(set_to_none=True)
        arithmetic.publish()
        return loss.detach()

    def later() -> dict[str, Any]:
        return {"proofs": {rung.name: rung.proof(task.trained.job) for rung in task.trained.plan.rungs}}

    about = {"active": task.trained.active(optimizer, training)}
    return Arm(step, task.model, task.flops_per_item, about, later)


def theirs(race: Race, compiled: bool, liger: bool) -> Arm:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM, modeling_llama

    training = race.training("decoder", "")
    shape, loop = training.model, training.loop
    assert isinstance(shape, DecoderSettings)
    settings = write_config(shape.config(training.tokenizer.vocabulary), "float32" if race.tiny else "bfloat16")
    for earlier in ("rope_scaling", "rope_theta"):
        settings.pop(earlier)
    with torch.device(race.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model = model.to(dtype=torch.float32 if race.tiny else torch.bfloat16).train()
    patches = liger_patches(model, modeling_llama) if liger else {}
    rates = {"lr": loop.learning_rate, "betas": (loop.betas[0], loop.betas[1]), "weight_decay": loop.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **rates, fused=not race.tiny)
    run = torch.compile(model, dynamic=False, backend="eager" if race.tiny else "inductor") if compiled else model

    def step(index: int) -> Tensor:
        tokens = random_tokens(index, race.rows, training)[:, :-1]
        if not race.tiny:
            tokens = tokens.pin_memory().to(race.device, non_blocking=True)
        with attributes(modeling_llama, patches):
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), loop.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    about = {"transformers": version_of("transformers")} | ({"liger": version_of("liger-kernel")} if liger else {})
    return Arm(step, model, shape.flops_per_token(model, race.length), about)


def version_of(package: str) -> str:
    """Returns the version of a package, or "unknown" for one without metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def liger_patches(model: nn.Module, module: Any) -> dict[str, Any]:
    """Applies Liger to the model; undoes and returns its patches of the shared transformers module."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    before = dict(vars(module))
    apply_liger_kernel_to_llama(model=model)
    patches = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in patches:
        setattr(module, name, before[name])
    return patches


@contextmanager
def attributes(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def arms(race: Race, plans: list[str], also: list[str]) -> dict[str, Callable[[], Arm]]:
    found: dict[str, Callable[[], Arm]] = {}
    for kind in ("decoder", "memory"):
        for plan in plans:
            for other in ("", *(one for one in also if kind == "memory" or one != SLOTS)):
                name = ", ".join(filter(None, (f"redline {kind}", other, plan)))
                found[name] = lambda kind=kind, plan=plan, other=other: ours(race, kind, plan, other)
    found["transformers + liger"] = lambda: theirs(race, compiled=False, liger=True)
    found["transformers + torch.compile"] = lambda: theirs(race, compiled=True, liger=False)
    return found


def ready(race: Race, build: Callable[[], Arm]) -> tuple[Arm, dict[str, Any]]:
    """Returns the arm after warm-up with its first loss, set-up time and peak memory (without that of other arms)."""
    before = 0 if race.tiny else torch.cuda.memory_allocated()
    begun = time.perf_counter()
    arm = build()
    first = float(arm.step(0))
    seen: dict[str, Any] = {"first_loss": first, "first_step_s": time.perf_counter() - begun}
    guess = math.log(race.training("decoder", "").tokenizer.vocabulary)
    if not abs(first - guess) <= LARGEST_LOSS_ERROR:
        raise ArithmeticError(f"the first loss is {first:.3f}, but a uniform prediction has {guess:.3f}")
    arm.step(1)
    race.wait()
    if not race.tiny:
        torch.cuda.reset_peak_memory_stats()
    last = float(arm.step(2))
    if not math.isfinite(last):
        raise ArithmeticError(f"the third loss is {last}")
    if not race.tiny:
        seen["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    seen |= arm.about | {"parameters": sum(p.numel() for p in arm.model.parameters())}
    return arm, seen | arm.later()


def measure(
    race: Race,
    chosen: dict[str, Callable[[], Arm]],
    rounds: int,
    ceiling: float,
    is_late: Callable[[], bool],
    keep: Callable[[Iterable[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Returns a row for each arm; calls `keep` with all rows after every set-up and every round."""
    rows: dict[str, dict[str, Any]] = {}
    racing: dict[str, Arm] = {}
    for name, build in chosen.items():
        row = rows[name] = {"arm": name, "length": race.length, "batch": race.rows, "document": race.length}
        if is_late():
            row["failure"] = "skipped: the time of --limit-s was over"
            continue
        try:
            racing[name], seen = ready(race, build)
            row |= seen
        except Exception as failure:  # noqa: BLE001 (reported in the arm's row)
            row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
        free(race)
        keep(rows.values())
        print(f"{name}: {row.get('failure', 'ready')}", file=sys.stderr, flush=True)
    samples: dict[str, list[float]] = {name: [] for name in racing}
    for turn in range(rounds):
        for name, arm in racing.items():
            race.wait()
            begun = time.perf_counter()
            for index in range(STEPS_OF_A_TURN):
                arm.step(3 + turn * STEPS_OF_A_TURN + index)
            race.wait()
            samples[name].append((time.perf_counter() - begun) / STEPS_OF_A_TURN)
            rate = race.tokens / statistics.median(samples[name])
            mfu = rate * arm.flops_per_token / ceiling
            rows[name] |= {"tokens_per_s": rate, "mfu": mfu, "step_s": samples[name]}
        keep(rows.values())
    return list(rows.values())


def write_rows(out: Path, rows: Iterable[dict[str, Any]], figure: str) -> None:
    """Writes all rows; rows without the figure get a failure message, in case the run is killed before it is known."""
    complete = [row if figure in row or "failure" in row else {**row, "failure": CUT_OFF} for row in rows]
    write_text(out, "".join(json.dumps(row) + "\n" for row in complete))


def free(race: Race) -> None:
    gc.collect()
    if not race.tiny:
        torch.cuda.empty_cache()


def matmul_flops_per_s(device: torch.device) -> float:
    """Measures the rate of large bf16 matrix products (on a CPU, of small fp32 ones)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product, seconds = one, []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(STEPS_OF_A_TURN):
            product = one @ other
        product[0, 0].item()
        seconds.append((time.perf_counter() - begun) / STEPS_OF_A_TURN)
    return 2 * size**3 / statistics.median(seconds[5:])


def show(row: dict[str, Any]) -> str:
    head = f"{row['length']} × {row['batch']}, {row['arm']}"
    if "failure" in row:
        return f"{head}: {row['failure']}"
    peak = f", {row['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in row else ""
    return f"{head}: {row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.1%}{peak}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times training against transformers.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--length", type=int, action="append", help="tokens per row; repeatable, all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--only", action="append", default=[], help="run only arms whose name contains this; repeatable"
    )
    parser.add_argument("--plan", action="append", help=f"plan of Redline's arms; repeatable, {PLAN!r} by default")
    parser.add_argument(
        "--also", action="append", default=[], choices=ALSO, help="adds variants of Redline's arms; repeatable"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="set up no more arms after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="run tiny models on the CPU, as a smoke test")
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    if given.tiny and FP8 in given.also:
        print("--tiny runs in fp32: omit --also fp8.", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    about: dict[str, Any] = {"gpu": "none" if given.tiny else torch.cuda.get_device_name(), "torch": torch.__version__}
    ceiling = matmul_flops_per_s(torch.device("cpu" if given.tiny else "cuda"))
    about["matmul_tflop_per_s"] = ceiling / 1e12
    about["command"] = command_line(sys.argv)
    rows: list[dict[str, Any]] = []
    for length, count in TINY_SHAPES if given.tiny else SHAPES:
        if given.length and length not in given.length:
            continue
        race = Race(length, count, given.tiny)
        plans = given.plan or ["fused_ops" if given.tiny else PLAN]
        chosen = {
            name: build
            for name, build in arms(race, plans, given.also).items()
            if not given.only or any(part in name for part in given.only)
        }
        torch.compiler.reset()
        # Many arms compile the same blocks in one process; the limit must not leave any of them uncompiled.
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS_OF_A_BLOCK):
            measured = measure(
                race,
                chosen,
                given.rounds,
                ceiling,
                is_late=lambda: time.perf_counter() - begun > given.limit_s,
                keep=lambda so_far: write_rows(given.out, [*rows, *(about | row for row in so_far)], "tokens_per_s"),
            )
        free(race)
        rows.extend(about | row for row in measured)
        write_rows(given.out, rows, "tokens_per_s")
        for row in measured:
            print(show(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
