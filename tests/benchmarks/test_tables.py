"""The README's results and docs/results.md come from the final race alone, sorted, and checked for staleness."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmark_scripts import load_script
from ladder.report.synthetic_climb import h200_climb, training_climb
from redline.ladder.measurement import Measurement, append
from redline.ladder.statistics import ratio_interval

ROOT = Path(__file__).parents[2]


tables = load_script("tables")
README = f"# Redline\n\nbefore\n\n{tables.BEGIN}\nold\n{tables.END}\n\nafter\n"
FINAL = "sdpa + bf16 + channels_last + compile(mode=max-autotune) + cuda_graph"


def write(root: Path, name: str, rows: list[Measurement]) -> Path:
    path = root / tables.RESULTS / name
    for row in rows:
        append(path, row)
    return path


def with_bf16(rows: list[Measurement]) -> list[Measurement]:
    """As on a GPU: eager bf16 races too."""
    raced = replace(rows[-2], plan="bf16", samples={"": tuple(s / 2 for s in rows[-3].samples[""])})
    return [*rows[:-1], raced, rows[-1]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def cells(root: Path) -> list[list[str]]:
    """The rows of the table of climbs in docs/results.md."""
    climbs = (root / "docs/results.md").read_text().partition("\n## ")[0]
    lines = [line for line in climbs.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_no_results_yet(root: Path) -> None:
    assert tables.main([], root) == 0
    assert (root / "README.md").read_text() == README.replace("\nold\n", "\n\nNo results yet.\n\n")
    assert (root / "docs/results.md").read_text().endswith("\n\nNo results yet.\n")
    assert tables.main(["--check"], root) == 0


def test_the_row_of_a_climb(root: Path) -> None:
    rows = with_bf16(h200_climb())
    write(root, "h200/unet.jsonl", rows)
    assert tables.main([], root) == 0
    (row,) = cells(root)
    eager, compiled, bf16, final = rows[-4:]
    assert row[0] == "[unet-880m](../benchmarks/results/h200/unet.jsonl)" and row[1] == "NVIDIA H200"
    assert row[2] == f"{eager.median_s() * 1e3:.3g} ms"
    assert row[3] == f"{compiled.median_s() * 1e3:.3g} ms (max-autotune)"
    assert row[4] == f"{bf16.median_s() * 1e3:.3g} ms"
    assert row[5] == f"`{FINAL}`" and row[6] == f"**{final.median_s() * 1e3:.3g} ms**"
    assert row[7] == str(ratio_interval([(eager.samples[""], final.samples[""])]))
    assert row[8] == str(ratio_interval([(compiled.samples[""], final.samples[""])]))
    assert row[9] == "4.1 GiB → 2.35 GiB" and row[10] == "relative error 0.0036 ≤ 0.02"


def test_the_last_run_of_a_file_counts(root: Path) -> None:
    older = [replace(row, workload="older", run="older") for row in h200_climb()]
    write(root, "h200/unet.jsonl", older + h200_climb())
    tables.main([], root)
    assert [row[0].partition("]")[0] for row in cells(root)] == ["[unet-880m"]


def test_rows_are_sorted_by_machine_and_workload(root: Path) -> None:
    for folder, file, machine, workload in (
        ("h200", "a", "NVIDIA H200", "path/to/mine.py:zebra"),
        ("h200", "b", "NVIDIA H200", "antelope"),
        ("arm", "c", "Neoverse-N1", "resnet"),
    ):
        rows = [replace(r, workload=workload, machine={**r.machine, "name": machine}) for r in h200_climb()]
        write(root, f"{folder}/{file}.jsonl", rows)
    tables.main([], root)
    found = [(row[1], row[0].partition("]")[0]) for row in cells(root)]
    assert found == [("NVIDIA H200", "[antelope"), ("NVIDIA H200", "[zebra"), ("Neoverse-N1", "[resnet")]
    page = tables.full_page(tables.find_results(root))
    titles = [line for line in page.splitlines() if line.startswith(("## ", "### "))]
    assert titles == ["## NVIDIA H200", "### antelope", "### zebra", "## Neoverse-N1", "### resnet"]


def test_the_readme_shows_the_chosen_climbs_in_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write(root, f"h200/{name}.jsonl", [replace(row, workload=name) for row in h200_climb()])
    monkeypatch.setattr(tables, "ON_FRONT_PAGE", (tables.RESULTS / "h200/c.jsonl", tables.RESULTS / "h200/a.jsonl"))
    tables.main([], root)
    lines = [line for line in (root / "README.md").read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| [c](benchmarks/results/h200/c.jsonl)",
        "| [a](benchmarks/results/h200/a.jsonl)",
    ]
    assert "**" in lines[2] and f"`{FINAL}`" in lines[2]


def test_the_front_page_names_committed_files() -> None:
    assert all((ROOT / path).is_file() for path in tables.ON_FRONT_PAGE)


def test_several_shapes_stand_in_one_cell(root: Path) -> None:
    write(root, "h200/unet.jsonl", h200_climb(shapes=("batch=1", "batch=4")))
    tables.main([], root)
    (row,) = cells(root)
    assert row[2].startswith("batch=1: ") and "<br>batch=4: " in row[2] and "×" in row[7]


def test_a_climb_that_found_nothing_and_one_won_by_torch_compile(root: Path) -> None:
    *earlier, eager, compiled, final = h200_climb()
    write(root, "h200/a.jsonl", [*earlier, compiled, replace(eager, verdict="kept")])
    write(root, "h200/b.jsonl", [*earlier, eager, replace(compiled, verdict="kept")])
    tables.main([], root)
    nothing, won = cells(root)
    assert nothing[5] == "`eager`" and nothing[7] == "–" and nothing[8].startswith("0.6")
    assert won[5] == "`compile(mode=max-autotune)`" and won[8] == "the same plan" and won[7].startswith("1.6")


def test_a_red_rival_has_no_time(root: Path) -> None:
    rows = h200_climb()
    red = tuple(replace(score, passed=False) for score in rows[-2].scores)
    write(root, "h200/unet.jsonl", [*rows[:-2], replace(rows[-2], scores=red), rows[-1]])
    tables.main([], root)
    (row,) = cells(root)
    assert row[3] == "–" and row[8] == "–"


def test_training_for_memory(root: Path) -> None:
    rows = training_climb()
    assert rows[-1].role == "final" and rows[-1].verdict == "kept"
    write(root, "h200/gpt.jsonl", rows)
    assert tables.main([], root) == 0
    (row,) = cells(root)
    assert "difference" in row[10]


def test_the_page_has_the_ladder_and_where_it_was_measured(root: Path) -> None:
    write(root, "h200/unet.jsonl", h200_climb())
    tables.main([], root)
    page = tables.full_page(tables.find_results(root))
    assert "[unet.jsonl](../benchmarks/results/h200/unet.jsonl)" in page
    for text in (
        "redline climb unet-880m --objective latency --budget 10m",
        "torch 2.11.0+cu128",
        "driver 570.86.15",
        "2026-",
        "4.94× faster than eager",
        FINAL,
        "#### The ladder",
        "| channels\\_last | kept |",
        "#### Rungs not kept, and why",
        "outside ≤ 0.02",
        "#### Proof that each rung took effect",
    ):
        assert text in page, text


def test_other_files_beside_the_climbs(root: Path) -> None:
    write(root, "h200/bench.jsonl", [replace(h200_climb()[0], role="bench")])
    assert tables.main([], root) == 0 and cells(root) == []


def test_check_names_each_stale_file_and_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "h200/unet.jsonl", h200_climb())
    assert tables.main(["--check"], root) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == [
        "README.md is stale: run `python benchmarks/tables.py`.",
        "docs/results.md is stale: run `python benchmarks/tables.py`.",
        "docs/images/ladder.svg is stale: run `python benchmarks/tables.py`.",
    ]
    assert (root / "README.md").read_text() == README and not (root / "docs").exists()
    assert tables.main([], root) == 0 and tables.main(["--check"], root) == 0
    page = root / "docs/results.md"
    page.write_text(page.read_text().replace("4.94×", "49.4×").replace("2.35 GiB", "2.36 GiB"))
    assert tables.main(["--check"], root) == 1
    assert capsys.readouterr().err == "docs/results.md is stale: run `python benchmarks/tables.py`.\n"


def test_only_what_is_between_the_markers_changes(root: Path) -> None:
    write(root, "h200/unet.jsonl", h200_climb())
    tables.main([], root)
    text = (root / "README.md").read_text()
    assert text.startswith("# Redline\n\nbefore\n\n<!-- results:begin -->\n\n| model |")
    assert text.endswith("|\n\n<!-- results:end -->\n\nafter\n")


@pytest.mark.parametrize(
    ("readme", "rows", "sentence"),
    [
        ("# no markers\n", [], "README.md must contain <!-- results:begin -->"),
        (f"{tables.END}\n{tables.BEGIN}\n", [], "README.md must contain"),
        (README + README, [], "once each"),
        (README, h200_climb()[:-1], "does not end with the final race"),
    ],
)
def test_what_cannot_be_written(
    root: Path, readme: str, rows: list[Measurement], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "README.md").write_text(readme)
    write(root, "h200/unet.jsonl", rows) if rows else None
    assert tables.main([], root) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert (root / "README.md").read_text() == readme and not (root / "docs").exists()
