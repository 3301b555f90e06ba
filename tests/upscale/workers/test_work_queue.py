"""The order of tasks, and that each is done exactly once even if workers die."""

import random
from collections import Counter
from pathlib import Path

import pytest

from redline.upscale.tasks import Outcome, Task
from redline.upscale.workers.shared_run import WorkQueue
from redline.upscale.workers.split_image import Part, Split, even_ranges


def files(folder: Path, **sizes: int) -> list[Task]:
    tasks = []
    for name, size in sizes.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(bytes(size))
        tasks.append(Task(path, folder / "out" / path.name))
    return tasks


def never(_task: Task, _count: int) -> Split | None:
    return None


def cut_up(task: Task, count: int) -> Split:
    folder = task.target.parent / ".parts"
    parts = tuple(Part(task.source, task.target, a, b, folder / str(a)) for a, b in even_ranges(8, count))
    return Split(task, folder, parts, unfinished=set(parts))


def test_videos_come_first_then_the_largest_images(tmp_path: Path) -> None:
    tasks = files(tmp_path, a_png=5, b_png=50, c_mkv=1, d_png=20)
    tasks.append(Task(tmp_path / "gone.png", tmp_path / "out" / "gone.png"))
    queue = WorkQueue(tasks, ["one", "two"], never)
    assert queue.take("one", image_only=True) is None  # a video comes next
    taken = [queue.take("one"), *(queue.take("two", image_only=True) for _ in range(4))]
    assert [task.source.name for task in taken if task] == ["c.mkv", "b.png", "d.png", "a.png", "gone.png"]
    assert queue.take("one") is None and queue.unfinished


def test_an_image_is_split_by_its_share_of_the_work(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def remember(task: Task, count: int) -> None:
        asked.append((task.source.name, count))

    queue = WorkQueue(files(tmp_path, a_png=50, b_png=10, c_png=10, d_png=10), list("wxyz"), remember)
    while queue.take("w"):
        pass
    # 50 of 80 bytes are the work of three of four workers; then each remaining third is that of two.
    assert asked == [("a.png", 3), ("b.png", 2), ("c.png", 2), ("d.png", 4)]


def test_a_failed_part_fails_the_image(tmp_path: Path) -> None:
    (task,) = files(tmp_path, a_png=5)
    queue = WorkQueue([task], list("xyz"), cut_up)
    parts = [part for worker in "xyz" if isinstance(part := queue.take(worker), Part)]
    assert [(part.first, part.last) for part in parts] == [(0, 2), (2, 5), (5, 8)]
    assert queue.rows_done(parts[1], 2) == (2, 8) and queue.rows_done(parts[0], 1) == (3, 8)
    assert queue.finished("y", Outcome(parts[1], notes=("said",))) is None
    assert queue.finished("x", Outcome(parts[0], notes=("said",))) is None
    done = queue.finished("z", Outcome(parts[2]))
    assert isinstance(done, Split) and not done.error and not queue.unfinished

    queue = WorkQueue([task], list("xyz"), cut_up)
    first, second = queue.take("x"), queue.take("y")
    assert first and second
    assert queue.finished("x", Outcome(first, error="it is damaged.")) is None
    assert queue.take("z") is None  # the third part was dropped
    (done,) = queue.lost("y", "it died")  # and so was the second
    assert isinstance(done, Split) and done.error == "it is damaged." and not queue.unfinished


def test_the_task_of_a_dead_worker_is_retried_once(tmp_path: Path) -> None:
    one, two = files(tmp_path, a_png=5, b_png=4)
    queue = WorkQueue([one, two], list("xyz"), never)
    assert queue.take("x") == one and queue.lost("x", "x died") == []
    assert queue.take("y") == one
    (outcome,) = queue.lost("y", "y died of SIGKILL")
    assert isinstance(outcome, Outcome) and outcome.task == one
    assert outcome.error == f"cannot upscale {str(one.source)!r}: y died of SIGKILL."
    queue = WorkQueue([one, two], list("xyz"), never)
    for worker in "xy":  # it had no memory left, so the task is not the cause
        assert queue.take(worker) == one and queue.lost(worker, "no memory", its_own_fault=True) == []
    assert queue.take("z") == one and queue.finished("z", Outcome(one)) == Outcome(one)
    (last,) = queue.lost("z", "z died")  # it had no task, and no worker is left
    assert isinstance(last, Outcome) and last.task == two and not queue.unfinished


@pytest.mark.parametrize("seed", range(20))
def test_every_task_is_settled_exactly_once(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = {f"f{i}_{'mkv' if i % 5 == 4 else 'png'}": rng.randrange(1, 100) for i in range(12)}
    tasks = files(tmp_path, **sizes)
    workers = list("vwxyz")
    queue = WorkQueue(tasks, workers, lambda task, count: cut_up(task, count) if rng.random() < 0.5 else None)
    held: dict[str, list[Task]] = {worker: [] for worker in workers}
    settled: Counter[Task] = Counter()
    while queue.unfinished:
        worker = rng.choice(list(held))
        done: list[Outcome | Split | None] = []
        if rng.random() < 0.05:
            done += queue.lost(worker, "it died")
            del held[worker]
        elif held[worker] and rng.random() < 0.5:
            task = held[worker].pop(rng.randrange(len(held[worker])))
            done.append(queue.finished(worker, Outcome(task, error="bad." if rng.random() < 0.2 else "")))
        elif task := queue.take(worker, image_only=rng.random() < 0.5):
            held[worker].append(task)
        settled.update(one.task for one in done if one is not None)
    assert settled == Counter(tasks)
