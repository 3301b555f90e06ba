"""The plan as TOML, made from its one-line form alone, is the document that Plan itself writes and reads."""

import tomllib

import pytest

from redline.ladder.plan import Plan
from redline.ladder.report.plan_text import plan_toml


@pytest.mark.parametrize("text", ["eager", "bf16", "bf16 + channels_last", "tf32 + compile"])
def test_reads_back_as_the_same_plan(text):
    assert Plan.from_document(tomllib.loads(plan_toml(text))) == Plan.parse(text)


def test_the_objective_is_told():
    assert Plan.from_document(tomllib.loads(plan_toml("bf16", "memory"))).objective == "memory"


def test_options_keep_their_kind():
    document = tomllib.loads(
        plan_toml('a(mode=max-autotune, deep=true, share=0.5, count=-3, names=[x y]) + b(t=say "hi")')
    )
    assert document == {
        "schema": 1,
        "rung": [
            {
                "name": "a",
                "mode": "max-autotune",
                "deep": True,
                "share": 0.5,
                "count": -3,
                "names": ["x", "y"],
            },
            {"name": "b", "t": 'say "hi"'},
        ],
    }
