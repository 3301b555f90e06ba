"""Two workers on the CPU give the same bytes as one, also if one of them is killed or fails."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import av
import numpy as np
import pytest
import torch
from PIL import Image

import redline.cli
from forked_python import COMMAND_LINE, ForkedPython
from redline.errors import RedlineError
from redline.files.partial import is_partial
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale import session
from redline.upscale.session import Upscaling
from redline.upscale.settings import Tiles, UpscaleSettings
from redline.upscale.tasks import Listener, Outcome, Task, find_tasks
from redline.upscale.tiling import Cut, Tiling
from redline.upscale.video.settings import VideoSettings
from redline.upscale.workers import crew, shared_run
from redline.upscale.workers.crew import (
    Ask,
    Crew,
    Failed,
    Job,
    ListenerCall,
    Member,
    Proposal,
    start_crew,
    worker_devices,
)
from redline.upscale.workers.shared_run import SharedRun
from redline.upscale.workers.split_image import Split
from redline.upscale.workers.torchrun import Rank


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), path)
    return path


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[ForkedPython]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # is read when torch is imported
        with ForkedPython("redline.cli.upscale", "redline.upscale.workers.worker") as forked:
            yield forked


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch, forked_workers: ForkedPython) -> list[list[Member]]:
    """Returns a list that collects the members of every crew that is started, by forks."""
    started: list[list[Member]] = []
    monkeypatch.setattr(crew, "start_module", forked_workers.start_module)

    def remember(devices: list[str]) -> Crew:
        made = start_crew(devices)
        started.append(list(made.members))
        return made

    monkeypatch.setattr(session, "start_crew", remember)
    return started


def small(weights: Path, **others: object) -> UpscaleSettings:
    """Uses the smallest tiles, because the machine may have only two cores."""
    return UpscaleSettings(weights, device="cpu", tile=32, margin_px=4, ramp_px=4, **others)


def save(path: Path, height: int, width: int, channels: int = 3, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    Image.fromarray(samples).save(path)
    return path


def film(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=5)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        for seed in range(3):
            samples = np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(samples)))
        container.mux(stream.encode())
    return path


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def left_over(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if is_partial(path)]


def are_gone(members: list[Member]) -> bool:
    return all(member.process is not None and member.process.poll() is not None for member in members)


def same_bytes(folder: Path, other: Path) -> bool:
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    there = sorted(path.relative_to(other) for path in other.rglob("*.png"))
    return names == there and all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_two_workers_give_the_same_bytes_as_one(
    weights: Path, crews: list[list[Member]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a video, an image large enough to split, a damaged image, and a few more."""
    inside = tmp_path / "in"
    for index in range(3):
        save(inside / "deep" / f"{index}.png", 30 + 9 * index, 50 - 7 * index, 3 + index % 2, index)
    tall, bad = save(inside / "tall.png", 301, 30), save(inside / "bad.png", 90, 60)
    bad.write_bytes(bad.read_bytes()[:5000])
    film(inside / "film.mkv")
    settings = small(weights, split_pixels=6_000, videos=VideoSettings(codec="ffv1"), workers=1)
    alone = Upscaling(settings).run(find_tasks([inside], tmp_path / "one", 2), tmp_path / "one")
    splits: list[Split] = []

    def remember(*arguments: object) -> Split | None:
        found = split(*arguments)
        splits.extend([found] if found else [])
        return found

    split = shared_run.split
    monkeypatch.setattr(shared_run, "split", remember)
    said: list[str] = []
    rows: list[tuple[Path, int, int]] = []
    heard: list[Path] = []
    listener = Listener(
        said.append,
        lambda outcome: heard.append(outcome.task.source),
        lambda task, done, total: rows.append((task.source, done, total)),
    )
    tasks, out = find_tasks([inside], tmp_path / "two", 2), tmp_path / "two"
    monkeypatch.setattr(Upscaling, "_run_alone", None)
    two = replace(settings, workers=2)
    together = Upscaling(two, listener).run(tasks, out)

    assert sorted(heard) == sorted(task.source for task in tasks)
    assert {o.task: (o.width, o.height) for o in together if not o.error} == {
        Task(o.task.source, out / o.task.source.relative_to(inside)): (o.width, o.height) for o in alone if not o.error
    }
    (failed,) = (o for o in together if o.error)
    assert failed.task.source == bad and [o.error for o in alone if o.error] == [failed.error]
    assert same_bytes(tmp_path / "one", out) and (out / "tall.png").exists()
    assert np.array_equal(frames(tmp_path / "one" / "film.mkv"), frames(out / "film.mkv"))
    assert [found.task.source for found in splits] == [tall] and len(splits[0].parts) == 2
    assert [entry for entry in rows if entry[0] == tall][-1] == (
        tall,
        splits[0].parts[-1].last,
        splits[0].parts[-1].last,
    )
    assert said[0].endswith("3 tiles of 32 × 32 at a time, 2 workers") and len(said) == 1
    assert len(crews) == 1 and are_gone(crews[0]) and not left_over(tmp_path)
    # A later run resumes from the journal of the two workers.
    resumed = Upscaling(replace(two, resume=True))
    monkeypatch.undo()
    assert [o.task.source for o in resumed.run(tasks, out) if not o.skipped] == [bad]


def test_the_tasks_of_a_killed_worker_are_done_by_others(
    weights: Path, crews: list[list[Member]], tmp_path: Path
) -> None:
    for index in range(6):
        save(tmp_path / "in" / f"{index}.png", 90, 30 + index, 3, index)
    said: list[str] = []
    killed: list[int] = []

    def kill(*_: object) -> None:
        process = crews[0][1].process
        assert process is not None
        # Kills the worker as soon as it has a partial file.
        if not killed and any(f".{process.pid}." in path.name for path in left_over(out)):
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    tasks, out = find_tasks([tmp_path / "in"], tmp_path / "out", 2), tmp_path / "out"
    outcomes = Upscaling(small(weights, workers=2), Listener(said.append, image_progress=kill)).run(tasks, out)
    assert killed and said[1:] == ["worker 2 on cpu died of SIGKILL (out of memory?); the others continue"]
    assert not any(o.error for o in outcomes) and sorted(o.task.source for o in outcomes) == [t.source for t in tasks]
    assert are_gone(crews[0]) and not left_over(tmp_path)
    Upscaling(small(weights)).run(find_tasks([tmp_path / "in"], tmp_path / "calm", 2))
    assert same_bytes(tmp_path / "calm", out)


def test_ctrl_c_ends_all_workers_and_leaves_no_partial_files(
    weights: Path, crews: list[list[Member]], tmp_path: Path
) -> None:
    tall = save(tmp_path / "in" / "tall.png", 3000, 60)
    settings = small(weights, workers=2, split_pixels=20_000)
    seen: list[Path] = []

    def interrupt(_task: Task, _rows: int, _total: int) -> None:
        if not seen:
            seen.extend([*left_over(tmp_path), tall])
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Upscaling(settings, Listener(image_progress=interrupt)).run([Task(tall, tmp_path / "out" / "tall.png")])
    assert len(seen) > 1  # there were partial files
    assert are_gone(crews[0]) and not list((tmp_path / "out").iterdir())


def test_upscaling_with_two_torchrun_ranks(
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked_workers: ForkedPython,
) -> None:
    """Rank 0 runs here, prints the results and sets the exit code; the other rank prints nothing."""
    for index in range(4):
        save(tmp_path / "in" / f"{index}.png", 60, 50 + index, 3, index)
    (tmp_path / "in" / "bad.png").write_text("no picture")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["redline", "upscale", "in", "-o", "out", "-w", str(weights), "--device", "cpu", "--tile", "96"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with (tmp_path / "other.txt").open("w") as printed:
        environment = {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1"}
        words = {"cwd": tmp_path, "stdout": printed, "stderr": printed, "environment": environment}
        often = "import redline.cli.live_line; redline.cli.live_line.LINE_EVERY_S = 0.01; "
        other = forked_workers.start(often + COMMAND_LINE, *arguments[1:], **words)
    for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            redline.cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
        code = other.wait()
    out, told = capfd.readouterr()
    silent = (tmp_path / "other.txt").read_text()
    assert (end.value.code, code) == (1, 0), told + silent
    assert len(out.splitlines()) == 4 and "4 upscaled, 1 failed" in told and "2 workers" in told
    assert silent == ""
    Upscaling(UpscaleSettings(weights, device="cpu", tile=96)).run(find_tasks([tmp_path / "in"], tmp_path / "one", 2))
    assert same_bytes(tmp_path / "one", tmp_path / "out") and not left_over(tmp_path)


def pipes(*names: str) -> tuple[Crew, list[Connection]]:
    """Returns a crew without processes, and the workers' ends of its connections."""
    pairs = [Pipe() for _ in names]
    return Crew([Member(name, ours) for name, (ours, _) in zip(names, pairs, strict=True)]), [end for _, end in pairs]


def test_workers_agree_on_tiles_or_report_why_not() -> None:
    job = Job(UpscaleSettings(), (), None, ((100, 70),))
    good = Proposal(((64, 64),), 3, "eager", "abc")
    for proposals, expected in (
        ((good, Proposal(((80, 48), (48, 80)), 4, "eager", "abc")), Tiles(((80, 48), (48, 80)), 3)),
        ((good, Failed("2 GiB are too little.")), Tiles(((64, 64),), 3)),
        ((good, Proposal(((64, 64),), 3, "bf16", "abc")), "two has the plan bf16 and others have eager"),
        ((Proposal(((64, 64),), 3, "eager", "abd"),), "one has different weights"),
        ((Failed("there is no memory."), None), "no worker could start: (one|two)"),
    ):
        crew, ends = pipes(*("one", "two")[: len(proposals)])
        said: list[str] = []
        run = SharedRun(crew, job, Listener(said.append))
        for end, proposal in zip(ends, proposals, strict=True):
            if proposal is not None:
                end.send(proposal)
            if not isinstance(proposal, Proposal):
                end.close()
        with crew:
            if isinstance(expected, Tiles):
                assert run.agree("eager", "abc") == expected
                assert ends[0].recv() == job and ends[0].recv() == expected
                assert said == ([] if len(crew) == 2 else ["two: 2 GiB are too little; it did not start"])
            else:
                with pytest.raises(RedlineError, match=expected):
                    run.agree("eager", "abc")


def test_the_tasks_of_a_failed_worker_are_done_by_others(tmp_path: Path) -> None:
    tasks = [Task(tmp_path / f"{name}.png", tmp_path / "out" / f"{name}.png") for name in "abc"]

    def work(end: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                end.send(Ask(at_once=False))
                end.send(ListenerCall("finished", (Outcome(end.recv()),)))

    for others in (1, 0):
        crew, ends = pipes("one", "two")
        ends[0].send(Ask(at_once=False))
        ends[0].send(Failed("no memory."))
        ends[0].close()
        threads = [Thread(target=work, args=(end,)) for end in ends[1:][:others]]
        if not others:
            ends[1].send(Failed("no memory here either."))
            ends[1].close()
        for thread in threads:
            thread.start()
        run, heard = SharedRun(crew, Job(UpscaleSettings(), (), None, ()), Listener()), []
        with crew:
            if others:
                assert sorted(o.task.source for o in run.run(tasks, Tiling.square(Cut(32, 4, 4)), 2, heard.append)) == [
                    task.source for task in tasks
                ]
            else:
                with pytest.raises(RedlineError, match="no memory"):
                    run.run(tasks, Tiling.square(Cut(32, 4, 4)), 2, heard.append)
        assert len(heard) == 3 * others
        for thread in threads:
            thread.join()


def test_which_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_devices("cpu") == ["cpu"] and worker_devices("cpu", 3) == ["cpu"] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert worker_devices("auto") == worker_devices("cuda") == ["cuda:0", "cuda:1"]
    assert worker_devices("cuda:1") == ["cuda:1"] and worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(RedlineError, match="workers = 0 must be a whole number .at least 1."):
        UpscaleSettings(workers=0)
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert Rank.find(environment) is None and Rank.find({**environment, "MASTER_ADDR": "a", "WORLD_SIZE": "1"}) is None
    rank = Rank.find({**environment, "MASTER_ADDR": "a"})
    assert rank == Rank(3, 4, 1, 2, "a", 29500)
    assert rank.device("cpu") == ("cpu", 2) and rank.device("auto") == ("cuda:1", 1)
    assert rank.device("cuda:0") == ("cuda:0", 2) and replace(rank, local_count=4).device("auto") == ("cuda:1", 2)
    with pytest.raises(RedlineError, match="not a number"):
        Rank.find({**environment, "MASTER_ADDR": "a", "RANK": "first"})
