"""The pages of models' results: from the rows alone, stale when they change, failures shown."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from redline.errors import RedlineError

PATH = Path(__file__).parents[2] / "benchmarks/model_tables.py"


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)
        yield loaded()


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("redline_model_tables", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    path = root / "benchmarks/results/h200" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "docs").mkdir(exist_ok=True)


def kernel_row(arm: str, **values: Any) -> dict[str, Any]:
    about = {
        "op": "swiglu",
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "triton": "3.6",
        "copy_tb_per_s": 4.0,
        "command": "python swiglu.py --out x",
    }
    return {**about, "case": "forward", "rows": 8, "arm": arm, **values}


def timed(arm: str, median_ms: float) -> dict[str, Any]:
    times = {"median_ms": median_ms, "p20_ms": median_ms, "p80_ms": median_ms, "tb_per_s": 3.0}
    return kernel_row(arm, **times, peak_bytes=2**30, relative_error=1e-3, captured=arm != "liger")


def test_ratios_come_from_the_rows_and_failures_are_shown(tmp_path: Path, tables: ModuleType) -> None:
    rows = [timed("liger", 3.0), timed("redline", 1.5), kernel_row("eager", failure="no room")]
    write(tmp_path, "kernels/swiglu.jsonl", rows)
    assert "| [`swiglu`](../benchmarks/results/h200/kernels/swiglu.jsonl) | 1 | **2.00×** | 2.00–2.00× | 0 |" in (
        tables.transformer_page(tmp_path)
    )
    text = tables.full_page(tmp_path)
    assert "| forward: rows 8 | **redline** | 1.5 ms | 1.5–1.5 | 1.00× | 75% | – | 1.00 GiB | 1.0e-03 |" in text
    assert "liger (not in a graph) | 3 ms | 3–3 | 2.00×" in text and "| eager | no room |" in text
    assert "`python swiglu.py --out x` in benchmarks/kernels" in text
    text = text[text.index("| case") :]
    assert text.index("redline") < text.index("liger") < text.index("no room")


def test_training_and_decoding_have_their_own_columns(tmp_path: Path, tables: ModuleType) -> None:
    about = {"gpu": "NVIDIA H200", "torch": "2.11", "command": "c", "arm": "ours", "batch": 4, "parameters": 124e6}
    training = {**about, "length": 2048, "tokens_per_s": 527530.2, "mfu": 0.674, "peak_bytes": 3 * 2**30}
    write(tmp_path, "text/train_speed.jsonl", [training, {**about, "length": 8192, "failure": "out of memory"}])
    decoding = {
        "ms_per_token": 0.9657,
        "tokens_per_s": 1035.5,
        "prefill_ms": 19.5,
        "prompt": 128,
        "relative_error": 0.02,
    }
    write(tmp_path, "text/decode.jsonl", [about | decoding])
    text = tables.transformer_page(tmp_path)
    assert "| 2,048 × 4 | ours | **527,530** | 67.4% | 3.00 GiB | 124M |" in text
    assert "| 8,192 × 4 | ours | out of memory |" in text
    assert "| 4 | ours | **0.966** | 1,036 | 19.5 ms of 128 tokens | 2.0e-02 | 0.12B |" in text
    long = {
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "command": "c",
        "arm": "redline memory",
        "length": 8192,
        "ms_per_token": 0.4,
    }
    long |= {"state_bytes": 3 * 2**20, "peak_bytes": 5 * 2**20, "prefill_tokens_per_s": 1e6}
    write(tmp_path, "text/long_context.jsonl", [long])
    expected = "| 8,192 | redline memory | 3.0 MiB | 5.0 MiB | 1,000,000 tokens/s | 0.400 |"
    assert expected in tables.transformer_page(tmp_path)


def test_a_page_that_does_not_follow_its_rows_is_stale(tmp_path: Path, tables: ModuleType) -> None:
    write(tmp_path, "kernels/swiglu.jsonl", [timed("liger", 3.0), timed("redline", 1.5)])
    assert tables.main(["--check"], tmp_path) == 1 and not (tmp_path / tables.TRANSFORMER_PAGE).exists()
    assert tables.main([], tmp_path) == 0 and tables.main(["--check"], tmp_path) == 0
    write(tmp_path, "kernels/swiglu.jsonl", [timed("liger", 3.0), timed("redline", 1.6)])
    assert tables.main(["--check"], tmp_path) == 1


def test_live_rows_are_held_against_plain_ones(tmp_path: Path, tables: ModuleType) -> None:
    def live(name: str, rate: float, **values: Any) -> dict[str, Any]:
        shape = {"size": "tiny", "side": 64, "steps": 2, "frames": 500}
        times = dict.fromkeys(("model_ms", "p50_ms", "p95_ms", "p99_ms"), 1.5)
        row = {
            "gpu": "NVIDIA H200",
            "torch": "2.11",
            "command": "c",
            "shape": shape,
            "arm": {"name": name},
            "frames_per_s": rate,
        }
        rest = {"peak_bytes": 2**30, "setup_peak_bytes": 3 * 2**30, "failure": ""}
        rest |= dict.fromkeys(("least_psnr_db", "mean_psnr_db"))
        return {**row, **times, **rest, **values}

    fast = live("fp16", 400.0, least_psnr_db=41.0, mean_psnr_db=44.26)
    loop = live("loop", 80.0, arm={"name": "loop", "overlapped": False})
    write(tmp_path, "stream/lsd.jsonl", [live("fp32", 100.0), loop, fast, live("fp8", 0.0, failure="no room")])
    text = tables.stream_page(tmp_path)
    figures = "1.5 ms | **400** | 4.00 | 5.00 | 1.5 ms | 1.5 ms | 1.00 GiB | 3.00 GiB | 44.3 dB, least 41.0"
    assert f"| tiny | 64×64 | 2 | fp16 | {figures} |" in text
    assert "| fp8 | no room |" in text and "tiny" not in tables.transformer_page(tmp_path)


def test_the_committed_pages_are_fresh(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0


def test_training_the_live_model_is_shown_by_stage(tmp_path: Path, tables: ModuleType) -> None:
    about = {"gpu": "NVIDIA H200", "torch": "2.11", "command": "c", "size": "medium", "batch": 1, "frame_px": 64}
    row = {**about, "stage": "rollouts", "optimizer": "adamw", "checkpointing": True, "has_teacher": False}
    failed = {**row, "failure": "no room"}
    write(tmp_path, "stream/lsd_training.jsonl", [{**row, "peak_bytes": 7 * 2**30, "step_ms": 81.7}, failed])
    text = tables.stream_page(tmp_path)
    assert "| medium | 1 of 64×64 | rollouts | adamw | yes | no | **7.00 GiB** | 82 ms |" in text
    assert "| yes | – | no room | – |" in text


def test_video_results_show_their_stages(tmp_path: Path, tables: ModuleType) -> None:
    times = dict.fromkeys(("p50_s", "p99_s"), 0.0125)
    stages = dict.fromkeys(("capture", "wait", "copy_in", "compute", "copy_out", "display"), times)
    about = {"gpu": "NVIDIA H200", "torch": "2.11", "command": "c", "model": "tiny", "size": "8×8", "settings": "s"}
    report = {"frames_per_s": 327.3, "latency": times, "stages": stages}
    row = {**about, "source": "video.mp4", "plan": "bf16", "peak_memory_bytes": 2**30, "report": report}
    write(tmp_path, "stream/video-fast.jsonl", [row, {**row, "video": "python moving_video.py a.jpg video.mp4"}])
    text = tables.stream_page(tmp_path)
    assert "| video.mp4 | tiny |" in text and "| `python moving_video.py a.jpg video.mp4` | tiny |" in text
    assert (
        "## A video without an output: fast" in text
        and "| **327** | 12.5 ms | 12.5 ms | 1.00 GiB | 12, 12, 12," in text
    )


GOAL = """
[[goal]]
what = "a token"
result = "h200/text/decode.jsonl"
row = { arm = "redline" }
figure = "ms_per_token"
most = 1.2
unit = "ms"
[[goal]]
what = "over the best of others"
result = "h200/text/decode.jsonl"
row = { arm = "redline" }
over = { batch = 1 }
figure = "ms_per_token"
least = 1.5
[[goal]]
what = "memory"
result = "h200/text/decode.jsonl"
row = { arm = "redline" }
figure = "peak_bytes"
most = 2
unit = "GiB"
"""


def goals(root: Path, document: str = GOAL) -> None:
    about = {"gpu": "NVIDIA H200", "torch": "2.11", "command": "x", "batch": 1}
    times = {"redline": 1.0, "redline other": 0.1, "eager": 4.0, "peer": 1.4}
    rows = [{**about, "arm": arm, "ms_per_token": ms, "peak_bytes": 3 * 2**30} for arm, ms in times.items()]
    write(root, "text/decode.jsonl", rows)
    (root / "benchmarks/goals.toml").write_text(document)


def test_a_goal_is_met_or_missed_by_the_files_figure(tables: ModuleType, tmp_path: Path) -> None:
    goals(tmp_path)
    assert [line[:3] for line in tables.goal_lines(tmp_path)] == [
        ["a token", "≤ 1.2 ms", "**1 ms**"],
        ["over the best of others", "≥ 1.50×", "1.40×, missed"],
        ["memory", "≤ 2 GiB", "3 GiB, missed"],
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('arm = "redline"', 'arm = "absent"', "finds 0 measured rows"),
        ('arm = "redline"', "batch = 1", "finds 4 measured rows"),
        ("most = 1.2", "", "needs either most or least"),
    ],
)
def test_a_goal_that_names_no_single_row_is_an_error(
    tables: ModuleType, tmp_path: Path, old: str, new: str, said: str
) -> None:
    goals(tmp_path, GOAL.replace(old, new, 1))
    with pytest.raises(RedlineError, match=said):
        tables.goal_lines(tmp_path)
