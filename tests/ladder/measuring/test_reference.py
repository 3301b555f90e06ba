"""The reference outputs, for models built in any precision and models with state."""

from pathlib import Path
from typing import Any

import pytest

from redline.errors import WorkloadError
from redline.ladder.measuring.reference import run_reference
from redline.ladder.measuring.worker import Bench
from redline.ladder.measuring.worker_pool import WorkerPool

WORKLOADS = str(Path(__file__).parents[2] / "tiny_workloads.py")
SEEDS = (10, 11, 12)


def judged(name: str, folder: Path, plan: str = "", shapes: dict[str, dict[str, Any]] | None = None) -> bool:
    """Returns whether the model under a plan passes its own gates."""
    address, path, shapes = f"{WORKLOADS}:{name}", str(folder / "reference.pt"), shapes or {"": {}}
    run_reference(address, shapes, "cpu", {SEEDS: path}, "fp32")
    scores = Bench().setup(address, shapes, "cpu", plan, path, SEEDS)["scores"]
    return bool(scores) and all(score.passed for score in scores)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_reference_of_a_model_built_in_another_precision(dtype: str, tmp_path: Path) -> None:
    assert judged("in_another_precision", tmp_path, shapes={"": {"dtype": dtype}})


@pytest.mark.parametrize("name", ["remembers", "remembers_in_training"])
def test_a_model_that_changes_with_every_call_is_not_random(name: str, tmp_path: Path) -> None:
    assert judged(name, tmp_path)


def test_shapes_that_change_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the model of shape wide has different weights from that of narrow"):
        judged("of_width", tmp_path, shapes={"narrow": {"width": 4}, "wide": {"width": 8}})
    assert judged("of_width", tmp_path, shapes={"one": {"width": 4}, "many": {"width": 4, "batch": 7}})


def test_only_modules_of_installed_packages_may_be_imported_early(lent_pool: WorkerPool, tmp_path: Path) -> None:
    """Importing the user's own modules may have an effect, and packages that start threads do not survive a fork."""
    (tmp_path / "own_module.py").write_text("")
    source = """
import own_module
import redline
import torch
from torch.utils import tensorboard
{start}

def mine():
    return redline.Workload(lambda: torch.nn.Linear(4, 4), lambda seed: torch.randn(2, 4))
"""
    found = []
    for start in ("", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"):
        address = tmp_path / f"workload_{len(found)}.py"
        address.write_text(source.format(start=start))
        arguments = {"shapes": {"": {}}, "device": "cpu", "paths": {SEEDS: str(tmp_path / "reference.pt")}}
        worker = lent_pool.start()
        found.append(worker.ask("reference", 60, address=f"{address}:mine", dtype="fp32", **arguments)["modules"])
        worker.stop()
    quiet, threaded = found
    assert "torch.utils.tensorboard" in quiet and not any("own_module" in name or "workload" in name for name in quiet)
    assert threaded == []
