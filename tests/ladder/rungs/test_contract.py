"""What every rung promises, checked over the whole registry: a new rung gets these tests for free."""

import tomllib
from dataclasses import MISSING
from pathlib import Path

import pytest

from redline.errors import PlanError, RungError
from redline.ladder.plan import Plan, make_rung, parse_rung
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS, find_rung
from redline.machine.machine import Machine

ROOT = Path(__file__).parents[3]
NAMES = list(RUNGS)
MACHINE = Machine.detect("cpu")


@pytest.fixture(params=NAMES)
def rung(request: pytest.FixtureRequest) -> type[Rung]:
    return RUNGS[request.param]


def configured(cls: type[Rung]) -> list[Rung]:
    """The default, every variant of a climb, and every choice of every option that may stand alone."""
    found = [cls(), *cls.variants(MACHINE)]
    for item in cls.options():
        values = (True, False) if isinstance(item.default, bool) else item.metadata.get("choices", ())
        for value in values:
            try:
                found.append(cls(**{item.name: value}))
            except RungError as error:
                # It may want another option beside it, but a listed choice is never refused as such.
                assert "(supported:" not in str(error)
    return found


def test_one_name_everywhere(rung: type[Rung]) -> None:
    assert rung.__module__ == f"redline.ladder.rungs.{rung.name}"
    assert (ROOT / "tests" / "ladder" / "rungs" / f"test_{rung.name}.py").is_file()
    page = ROOT / "docs" / "rungs" / f"{rung.name}.md"
    assert page.is_file()
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {rung.name}\n")
    missing = [item.name for item in rung.options() if f"`{item.name}`" not in text]
    assert not missing, f"{page.name} does not explain {missing}"


def test_every_file_is_registered() -> None:
    files = {path.stem for path in (ROOT / "src" / "redline" / "ladder" / "rungs").glob("*.py")} - {"__init__"}
    assert {name for name in files if not name.startswith("_")} == set(NAMES)


def test_summary_is_one_line_that_says_something(rung: type[Rung]) -> None:
    assert "\n" not in rung.summary
    assert len(rung.summary.split()) >= 3
    assert not rung.summary.endswith(".")


def test_order_follows_the_stages(rung: type[Rung]) -> None:
    assert isinstance(rung.stage, Stage)
    stages = [cls.stage for cls in RUNGS.values()]
    assert stages == sorted(stages)


def test_rung_supports_inference_or_training(rung: type[Rung]) -> None:
    assert rung.inference or rung.training


def test_options_have_a_default_and_help(rung: type[Rung]) -> None:
    for item in rung.options():
        assert item.default is not MISSING
        assert item.metadata.get("help"), f"{rung.name}.{item.name} has no help"
        choices = item.metadata.get("choices", ())
        assert not choices or item.default in choices


def test_excludes_names_that_exist(rung: type[Rung]) -> None:
    assert rung.excludes <= set(NAMES) - {rung.name}


def test_variants_are_instances_of_the_rung(rung: type[Rung]) -> None:
    variants = rung.variants(MACHINE)
    assert variants
    assert all(type(variant) is rung for variant in variants)
    assert len(set(variants)) == len(variants)


def test_round_trip_through_one_line_and_toml(rung: type[Rung]) -> None:
    for one in configured(rung):
        plan = Plan((one,))
        assert parse_rung(str(one)) == one
        assert Plan.parse(str(plan)) == plan
        assert Plan.from_document(tomllib.loads(plan.to_toml())) == plan


def test_why_not_is_a_sentence_without_capital_or_full_stop(rung: type[Rung]) -> None:
    for one in configured(rung):
        reason = one.why_not(MACHINE)
        assert isinstance(reason, str)
        assert not reason or (reason == reason.strip() and not reason.endswith("."))


def test_unknown_option_is_refused_by_name(rung: type[Rung]) -> None:
    with pytest.raises(PlanError, match="no_such_option"):
        make_rung(rung.name, {"no_such_option": 1})
    with pytest.raises(PlanError, match="no_such_option"):
        Plan.parse(f"{rung.name}(no_such_option=1)")


def test_bad_choice_is_refused_by_name(rung: type[Rung]) -> None:
    for item in rung.options():
        if item.metadata.get("choices", ()):
            wrong = {bool: True, int: 987_654_321, float: 987_654_321.5}.get(type(item.default), "no_such_choice")
            with pytest.raises(RungError, match=item.name):
                rung(**{item.name: wrong})


def test_value_of_the_wrong_type_is_refused_by_name(rung: type[Rung]) -> None:
    for item in rung.options():
        if isinstance(item.default, (bool, int, float)):
            with pytest.raises(PlanError, match=item.name):
                make_rung(rung.name, {item.name: "neither a number nor a truth"})


def test_unknown_rung_is_refused_by_name() -> None:
    with pytest.raises(RungError, match="no_such_rung"):
        find_rung("no_such_rung")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("align(multiple=2)", "align(multiple=1)"),
        ("checkpoint(every=1)", "checkpoint(every=0)"),
        ("compress_activations(min_bytes=0)", "compress_activations(min_bytes=-1)"),
        ("cuda_graph(limit=1, rehearsals=1)", "cuda_graph(limit=0)"),
        ("cuda_graph(limit=2)", "cuda_graph(rehearsals=0)"),
        ("grad_scaler(switch_after=0)", "grad_scaler(backoff=0.0)"),
        ("grad_scaler(growth_factor=1.0, growth_interval=1)", "grad_scaler(init_scale=0.0)"),
        ("int8(mode=static, calibration=percentile, percentile=100.0)", "int8(percentile=100.1)"),
        ("int8(percentile=0.1)", "int8(percentile=0.0)"),
        ("onnxruntime(int8=static, calibration=percentile, percentile=100.0)", "onnxruntime(percentile=100.1)"),
        ("onnxruntime(threads=0, percentile=50.1)", "onnxruntime(percentile=50.0)"),
        ("onnxruntime(threads=1)", "onnxruntime(threads=-1)"),
        ("streams(chunks=1, depth=1)", "streams(chunks=0)"),
        ("streams(depth=2)", "streams(depth=0)"),
    ],
)
def test_an_option_is_taken_at_its_limit_and_refused_beyond(text: str, refused: str) -> None:
    assert parse_rung(text)
    with pytest.raises(RungError, match=refused.partition("(")[0]):
        parse_rung(refused)
