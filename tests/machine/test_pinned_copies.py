"""Copies that take their time, on a device that is not there: nothing is read before it has come, or overwritten."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from redline.ladder.plan import Plan
from redline.ladder.rungs.streams import Pipeline
from redline.machine.pinned_copies import PinnedCopies, PlainCopies, _Buffer, _Pool
from redline.upscale import tile_runner as enlarging
from redline.upscale.image_run import ImageRun
from redline.upscale.network import Network
from redline.upscale.settings import ImageSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Cut, Tiling


class Late:
    """A device whose copies happen at any time after they are begun, in the order of their stream.

    Its computing stream may be as late; where it computes at once, waiting on it for an event is waiting here. Whoever
    touches memory without having waited sees what was there before.
    """

    timing = False

    def __init__(self, seed: int, computes_late: bool = True) -> None:
        self.computes_late = computes_late
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.computing, self.streams, self.made = LateStream(), [], 0
        self.streams.append(self.computing)

    def stream(self) -> "LateStream":
        self.streams.append(LateStream())
        return self.streams[-1]

    def event(self) -> "LateEvent":
        return LateEvent(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
        self.made += 1
        return torch.full(tuple(shape), 0xA5).to(dtype)

    def wait(self, stream: "LateStream", event: "LateEvent") -> None:
        assert event.recorded, "an event that was never recorded holds nobody up"
        if stream is self.computing and not self.computes_late:
            event.synchronize()
        else:
            with self.lock:
                stream.queue.append(("wait", event))

    def copy(self, target: Tensor, source: Tensor, stream: "LateStream") -> None:
        with self.lock:
            stream.queue.append(("do", lambda: target.copy_(source)))
            self.dawdle()

    def dawdle(self) -> None:
        """Time passes: some of what was begun is done."""
        with self.lock:
            for _ in range(self.random.choice([0, 0, 0, 1, 3])):
                self.step()

    def step(self) -> bool:
        """Does the next thing of some stream; False where nothing is left to do."""
        ready = [s for s in self.streams if s.queue and not (s.queue[0][0] == "wait" and not s.queue[0][1].is_over)]
        if ready:
            kind, what = self.random.choice(ready).queue.popleft()
            if kind != "wait":
                what()
        return bool(ready)


class LateStream:
    def __init__(self) -> None:
        self.queue: deque[tuple[str, object]] = deque()


class LateEvent:
    def __init__(self, device: Late) -> None:
        self.device, self.recorded, self.is_over = device, False, False

    def record(self, stream: LateStream) -> None:
        def over() -> None:
            self.is_over = True

        with self.device.lock:
            self.recorded = True
            stream.queue.append(("do", over))
            self.device.dawdle()

    def query(self) -> bool:
        self.device.dawdle()
        return self.is_over

    def synchronize(self) -> None:
        assert self.recorded
        with self.device.lock:
            while not self.is_over:
                assert self.device.step(), "a wait that never ends"


def computed(device: Late, tensor: Tensor) -> Tensor:
    """The same tensor, as work on the device makes it, some time."""
    result = torch.full_like(tensor, 1)
    with device.lock:
        device.computing.queue.append(("do", lambda: result.copy_(tensor)))
    return result


def fresh(rng: random.Random) -> Tensor:
    shape = [rng.choice([1, 2, 7, 30]) for _ in range(rng.randint(0, 3))]
    kind = rng.choice([torch.uint8, torch.uint16, torch.float32, torch.bool])
    numbers = np.random.default_rng(rng.randrange(10**9)).integers(0, 256, shape)
    return torch.as_tensor(numbers).to(kind)


def send(copies: PinnedCopies, tensors: list[Tensor], held: int) -> None:
    """Each goes in, is worked on and comes out; so many wait before that and behind, as they do between threads."""
    device = copies.device
    assert isinstance(device, Late)
    coming, going = deque(), deque()
    for index, tensor in enumerate(tensors):
        last = index == len(tensors) - 1
        sent = tensor.clone()
        coming.append((tensor, copies.to_device(sent)))
        sent.zero_()  # whoever sends it may use its memory again at once
        while coming and (len(coming) > held or last):
            expected, arriving = coming.popleft()
            result = computed(device, arriving.wait())
            arriving.release()
            going.append((expected, copies.to_host(result)))
        while going and (len(going) > held or last):
            expected, arriving = going.popleft()
            assert torch.equal(arriving.wait(), expected)
            arriving.release()
        device.dawdle()


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_everything_arrives_as_it_left(seed: int, streams: int) -> None:
    rng = random.Random(seed)
    device = Late(seed)
    copies = PinnedCopies.with_shared_streams(device, streams)
    held = rng.randrange(4)
    send(copies, [fresh(rng) for _ in range(80)], held)
    # What waits on either side has buffers, and those that are busy; not every tensor.
    assert device.made <= len(copies._pools) * 2 * (held + 2 + streams)


def test_a_buffer_that_nobody_took_is_busy_until_its_copy_is_over() -> None:
    """As when an image is given up with bands on their way."""
    for seed in range(12):
        device, tensor = Late(seed), torch.randint(1, 256, (5000,), dtype=torch.uint8)
        copies = PinnedCopies.with_shared_streams(device, 3)
        copies.to_device(tensor).release()
        (pool,) = copies._pools.values()
        (buffer,) = pool._free
        while not buffer.last_use.is_over:
            device.step()
        assert torch.equal(buffer.device[:5000], tensor)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_rings_are_reused_without_overwriting(seed: int, depth: int) -> None:
    """Each chunk has two inputs; sizes grow, so that buffers are replaced while copies are in flight."""
    rng = random.Random(seed)
    device = Late(seed)
    copies = PinnedCopies.with_stream_per_direction(device, depth)
    expected, returned = [], []
    for index in range(40):
        tensors = [torch.randint(0, 256, (rng.choice([5, 50, 10 * index + 1]),), dtype=torch.uint8) for _ in range(2)]
        sent = [copies.to_device(tensor.clone(), ring) for ring, tensor in enumerate(tensors)]
        results = [computed(device, copy.wait()) for copy in sent]
        for copy in sent:
            copy.release()
        expected += tensors
        returned += [copies.to_host(result, copies.empty_host(result.shape, result.dtype)) for result in results]
    assert all(torch.equal(copy.wait(), tensor) for copy, tensor in zip(returned, expected, strict=True))
    assert all(len(pool._free) <= depth for pool in copies._pools.values())


def test_a_pipeline_gives_what_the_function_gives() -> None:
    device = Late(0)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, str]:
        return computed(device, x), computed(device, y), "label"

    run = Pipeline(function, PinnedCopies.with_stream_per_direction(device, 2), 4, {})
    for rows in [10, 33, 7] * 20:
        x, y = torch.randn(rows, 3), torch.randn(rows)
        output = run(x.clone(), y.clone())
        assert torch.equal(output[0], x) and torch.equal(output[1], y) and output[2] == "label"


def test_memory_that_runs_out_raises_unless_it_may_be_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    device, warned, tensor = Late(0), [], torch.ones(3)
    monkeypatch.setattr(device, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        PinnedCopies.with_shared_streams(device, 2).to_device(tensor)
    copies = PinnedCopies.with_shared_streams(device, 2, warned.append)
    assert all(copies.to_device(tensor).wait() is tensor for _ in range(2)) and len(warned) == 1


def read_results_at_once(copies: PinnedCopies, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateEvent, "synchronize", lambda event: None)


def begin_before_the_input_has_come(copies: PinnedCopies, patch: pytest.MonkeyPatch) -> None:
    device, wait = copies.device, copies.device.wait
    patch.setattr(device, "wait", lambda stream, event: stream is device.computing or wait(stream, event))


def copy_out_before_it_is_computed(copies: PinnedCopies, patch: pytest.MonkeyPatch) -> None:
    device, wait = copies.device, copies.device.wait
    patch.setattr(device, "wait", lambda stream, event: wait(stream, event) if stream is device.computing else None)


def use_buffers_again_at_once(copies: PinnedCopies, patch: pytest.MonkeyPatch) -> None:
    put = _Pool.put

    def forget_events(pool: _Pool, buffer: _Buffer) -> None:
        buffer.copied = buffer.last_use = None
        put(pool, buffer)

    patch.setattr(_Pool, "put", forget_events)


@pytest.mark.parametrize(
    "mistake",
    [
        read_results_at_once,
        begin_before_the_input_has_come,
        copy_out_before_it_is_computed,
        use_buffers_again_at_once,
    ],
)
def test_each_mistake_is_seen(
    mistake: Callable[[PinnedCopies, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        for seed in range(12):
            copies = PinnedCopies.with_shared_streams(Late(seed), 3)
            mistake(copies, monkeypatch)
            send(copies, [torch.randint(0, 256, (5000,), dtype=torch.uint8) for _ in range(40)], held=1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * 3e5).repeat_interleave(2, -1).repeat_interleave(2, -2) / 3e5


@contextmanager
def late(seed: int) -> Iterator[list[Late]]:
    """Every tile_runner's device is late."""
    devices: list[Late] = []

    def copies_for(_device: torch.device, streams: int, say: Callable[[str], None]) -> PlainCopies:
        devices.append(Late(seed, computes_late=False))
        return PinnedCopies.with_shared_streams(devices[-1], streams, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enlarging, "copies_for", copies_for)
        yield devices


def enlarge(tasks: list[Task], streams: int, plan: str = "", said: list[str] | None = None) -> list[Outcome]:
    network = Network(Twice(), 2, 4, "a planted network", "digest")
    say = said.append if said is not None else lambda _text: None
    using = TileRunner(network, Plan.parse(plan), "cpu", Tiling.square(Cut(32, 4, 4, 4)), 2, say, streams)
    return ImageRun(using, ImageSettings()).run(tasks)


@pytest.mark.cpu
@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize(
    ("plan", "streams"), [("", 1), ("", 2), ("", 4), ("fp16(check=false)", 2), ("fp16(check=false)", 4)]
)
def test_pictures_are_the_same_however_late_copies_are(plan: str, streams: int, tmp_path: Path) -> None:
    """In fp16 a bright tile overflows in the middle of an image, with others already under way."""
    calm, shuffled = [], []
    for index in range(2):
        shape = (60 + 20 * index, 140 - 15 * index, 3 + index % 2)
        samples = np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)
        samples[: 40 + index, : 60 + index] >>= 4
        Image.fromarray(samples).save(tmp_path / f"{index}.png")
        for tasks, folder in ((calm, "calm"), (shuffled, "late")):
            tasks.append(Task(tmp_path / f"{index}.png", tmp_path / folder / f"{index}.png"))
    said: list[list[str]] = [[], []]
    assert not any(outcome.error for outcome in enlarge(calm, 1, plan, said[0]))
    with late(seed=streams) as devices:
        assert not any(outcome.error for outcome in enlarge(shuffled, streams, plan, said[1]))
    assert len(devices) == 1 and devices[0].made and said[0] == said[1] and len(said[0]) == bool(plan)
    for one, other in zip(calm, shuffled, strict=True):
        assert one.target.read_bytes() == other.target.read_bytes()
