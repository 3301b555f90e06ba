"""The documentation is true where a machine can tell: its Python runs, its links lead somewhere, nothing is missing."""

import contextlib
import re
import runpy
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from redline.cli import COMMANDS, load_command
from redline.ladder.rungs import RUNGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN = ("adding-a-rung.md", "workloads-of-your-own.md", "python-api.md", "ops.md")

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A page that defines tests means them to pass, and one that defines workloads means them to be usable.
_EPILOGUE = """

from redline.ladder.workload import Workload as _Workload, call as _call
if __name__ == "__main__":
    for _name, _value in list(globals().items()):
        if _name.startswith("test_"):
            _value()
        elif getattr(_value, "__annotations__", {}).get("return") is _Workload and _value.__module__ == "__main__":
            _work = _value()
            _model, _batch = _work.fresh_model("cpu"), _work.fresh_inputs(0, "cpu")
            _seen = _work.step(_model, _batch)
            if not _work.training:
                assert all(gate.judge(_seen, _seen).passed for gate in _work.gates), _name
            else:
                _work.loss(_seen, _batch).backward()
        else:
            continue
        print("checked", _name)
"""


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, spaces to hyphens, punctuation dropped."""
    titles = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# The climbs on the pages do not depend on torch.compile, which takes longest.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", RUN)
def test_python_on_the_page_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A block knows the names that the blocks before it defined; a process that it starts reads this block alone."""
    blocks = _BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))
    assert blocks
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for module in ("search.climb", "verify", "bench", "batch_size", "doctor"):
        lent = lambda: contextlib.nullcontext(request.getfixturevalue("lent_pool"))  # noqa: E731
        monkeypatch.setattr(import_module(f"redline.ladder.{module}"), "WorkerPool", lent)
    (tmp_path / "blocks").mkdir()
    known: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        for quantity, short in (("budget", "1s"), ("sampling", "50ms")):
            block = re.sub(rf'\b{quantity}="\d+m?s"', f'{quantity}="{short}"', block)
        block = block.replace('"examples/', f'"{tmp_path}/examples/')  # the workers are in another folder
        path = tmp_path / "blocks" / f"{number:03}.py"
        path.write_text(block + _EPILOGUE, encoding="utf-8")
        known |= runpy.run_path(str(path), known, "__main__")
    promised = {f"checked {test}" for test in re.findall(r"^def (test_\w+)", "\n".join(blocks), re.MULTILINE)}
    assert promised <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        found = (page.parent / place).resolve() if place else page
        assert found.exists(), f"{page.name}: no {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: no heading for {target}"


def test_the_index_names_every_page() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in _LINK.findall(index.read_text("utf-8"))}
    assert {page.resolve() for page in PAGES} - {index.resolve()} <= linked


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_with_its_options(name: str) -> None:
    text = (DOCS / "commands" / f"{name}.md").read_text(encoding="utf-8")
    command = load_command(name)
    commands = [command, *getattr(command, "commands", {}).values()]
    for parameter in (parameter for each in commands for parameter in each.params):
        if parameter.param_type_name == "option" and parameter.name != "help":
            option = max(parameter.opts, key=len)
            assert f"`{option}" in text or f" {option}" in text, f"{name}.md does not mention {option}"


def test_the_changelog_and_the_concepts_know_every_rung_and_verdict() -> None:
    from redline.ladder.measurement import VERDICTS

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in changelog for name in RUNGS)
    concepts = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert all(f"| `{verdict}` |" in concepts for verdict in VERDICTS)


def test_every_operator_and_every_bundled_setting_has_its_place() -> None:
    operators = {path.parent.name for path in (ROOT / "src" / "redline" / "ops").glob("*/__init__.py")}
    headings = " ".join(_HEADING.findall((DOCS / "ops.md").read_text(encoding="utf-8")))
    assert {name for name in operators if f"`{name}`" not in headings} == set()
    page = (DOCS / "commands" / "train.md").read_text(encoding="utf-8")
    bundled = {path.stem for path in (ROOT / "src" / "redline" / "training" / "configs").glob("*.toml")}
    assert {name for name in bundled if f"`{name}`" not in page and f" {name} " not in page} == set()


def test_every_setting_of_a_model_is_on_its_page() -> None:
    from redline.training.text.architectures import ARCHITECTURES

    page = (DOCS / "commands" / "train.md").read_text(encoding="utf-8")
    memory = next(part for part in page.split("\n\n") if part.startswith('With `kind = "memory"`'))
    for kind, settings in ARCHITECTURES.items():
        for name in settings.__dataclass_fields__:
            there = f"`{name}`" in memory if kind == "memory" else f"\n{name} = " in page
            assert there, f"train.md does not tell of {name} of a {kind} model"


def test_every_metric_is_explained() -> None:
    from redline.ladder.metrics import METRICS

    text = (DOCS / "workloads-of-your-own.md").read_text(encoding="utf-8")
    for metric in METRICS.values():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{metric.name}` |"))
        assert metric.better in line
