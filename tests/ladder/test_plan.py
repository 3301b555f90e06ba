"""Plans: parsing, saving, errors, and applying without changing the user's model."""

import copy
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline import Plan
from redline.errors import PlanError, RedlineError, RungError
from redline.ladder.job import Applied
from redline.ladder.plan import brief, read_plan
from tiny_workloads import Convolutions, Perceptron


@pytest.mark.parametrize(
    "text",
    [
        "eager",
        "channels_last",
        "bf16 + channels_last + compile(mode=max-autotune)",
        "int8(skip=[a.b c], mode=dynamic)",
    ],
)
def test_round_trip(text: str, tmp_path: Path) -> None:
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    plan.save(tmp_path / "plan.toml", {"workload": "x"})
    assert Plan.load(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bf16 + bf16", "twice"),
        ("compile + bf16", "wrong order"),
        ("bf16 + fp16", "exclude each other"),
        ("warp_drive", "unknown rung 'warp_drive'"),
        ("compile(speed=9)", "no option 'speed'"),
        ("compile(mode=ludicrous)", "unknown mode 'ludicrous'"),
        ("compile(fullgraph=perhaps)", "true or false"),
        ("compile(mode)", "write option=value"),
        ("bf16 + ", "cannot parse the rung"),
        ("BF 16", "cannot parse the rung"),
    ],
)
def test_invalid_plans_raise(text: str, sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("schema = ", "is not a readable plan: it is not TOML"),
        ("", "no integer `schema`"),
        ("schema = 99", "this Redline reads up to"),
        ("schema = 1\nrung = 3", r"\[\[rung\]\]"),
        ("schema = 1\n[[rung]]\nmode = 'x'", "has no name"),
        ("schema = 1\n[[rung]]\nname = 'compile'\nfullgraph = 'yes'", "true or false"),
        ("schema = 1\n[[rung]]\nname = 'compile'\nmode = 3", "must be text"),
    ],
)
def test_broken_plan_files(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=sentence):
        Plan.load(path)


def test_the_objective_is_saved_but_not_compared(tmp_path: Path) -> None:
    found = replace(Plan.parse("bf16"), objective="memory")
    found.save(tmp_path / "plan.toml")
    loaded = Plan.load(tmp_path / "plan.toml")
    assert loaded.objective == "memory" and loaded == found == Plan.parse("bf16")
    (tmp_path / "plan.toml").write_text('schema = 1\nobjective = "beauty"\n')
    with pytest.raises(RedlineError, match="unknown objective 'beauty'"):
        Plan.load(tmp_path / "plan.toml")


def test_missing_plan_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.toml")


def test_with_rung_replaces_excluded_rungs_and_keeps_the_order() -> None:
    plan = Plan.parse("bf16 + compile")
    assert str(plan.with_rung(Plan.parse("channels_last").rungs[0])) == "bf16 + channels_last + compile"
    assert str(plan.with_rung(Plan.parse("fp16").rungs[0])) == "fp16 + compile"
    assert str(plan.without("bf16")) == "compile"


def test_apply_leaves_the_users_model_and_flags_alone() -> None:
    model = Convolutions()
    before, training = copy.deepcopy(model.state_dict()), model.training
    with pytest.warns(UserWarning, match="the model is in training mode"):
        fast = Plan.parse("fold_batchnorm + channels_last").apply(model, torch.randn(1, 3, 9, 11))
    assert isinstance(fast, Applied)
    x = torch.randn(2, 3, 13, 17)
    with torch.no_grad():
        expected = model.eval()(x)
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
    model.train(training)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert model.layers[0].weight.is_contiguous()


def test_inference_rungs_are_refused_in_training_and_vice_versa() -> None:
    with pytest.raises(PlanError, match="for training only"):
        Plan.parse("checkpoint").apply(Perceptron(), torch.randn(2, 16))
    with pytest.raises(PlanError, match="for inference only"):
        Plan.parse("fold_batchnorm").apply(
            Perceptron(),
            torch.randn(2, 16),
            loss=lambda o, b: o.mean(),
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )


@pytest.mark.alone
@pytest.mark.parametrize("plan", ["eager", "channels_last"])
def test_an_applied_plan_adds_less_than_20_microseconds_a_call(plan: str) -> None:
    """Compares with the same model called directly, in turns; the input needs no conversion."""
    model = torch.nn.Conv2d(3, 3, 1).eval()
    fast = Plan.parse(plan).apply(model)
    plain = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)

    def seconds(function: torch.nn.Module, calls: int = 1000) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(calls):
                function(x)
        return (time.perf_counter() - start) / calls

    seconds(fast), seconds(plain)
    added = sorted(seconds(fast) - seconds(plain) for _ in range(9))
    assert added[4] < 20e-6


def test_apply_returns_a_training_step_with_loss_and_optimizer() -> None:
    model = Perceptron()
    step = Plan().apply(
        model, loss=lambda output, batch: (output**2).mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    losses = [float(step(torch.ones(4, 16))) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.parametrize("model", ["x", torch.randn(2), Perceptron])
def test_apply_refuses_what_is_not_a_module(model: object) -> None:
    with pytest.raises(
        PlanError, match=rf"model is a {type(model).__name__}, but a plan applies to a torch.nn.Module\."
    ):
        Plan().apply(model)


def test_unknown_rung_is_a_rung_error() -> None:
    with pytest.raises(RungError, match="choose from"):
        Plan.parse("nope")


def test_an_unknown_key_of_a_plan_file_raises(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('schema = 1\n[[rungs]]\nname = "bf16"\n')
    with pytest.raises(PlanError, match="unknown key 'rungs'"):
        Plan.load(tmp_path / "plan.toml")


def test_brief_shortens_only_long_lists() -> None:
    many = " ".join(f"layers.{index}.proj" for index in range(20))
    assert brief(f"bf16 + int8(skip=[{many}]) + compile") == "bf16 + int8(skip=[...]) + compile"
    assert brief("int8(skip=[head]) + compile") == "int8(skip=[head]) + compile"


def test_a_plan_is_given_as_a_plan_a_line_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.parse("fold_batchnorm + bf16")
    monkeypatch.chdir(tmp_path)
    plan.save("plan.toml")
    plan.save("plan-without-suffix")
    given = [plan, str(plan), "plan.toml", Path("plan.toml"), "plan-without-suffix", Path("plan-without-suffix")]
    assert [read_plan(one) for one in given] == [plan] * 6
    for missing in ("missing.toml", Path("missing")):
        with pytest.raises(RedlineError, match=r"missing(\.toml)?"):
            read_plan(missing)
    with pytest.raises(RedlineError, match="fp99"):
        read_plan("fp99")
