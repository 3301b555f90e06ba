"""`--traceback` shows where the user's code failed, here and in a trial; without it there is one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Seen

MINE = """
import torch
from torch import nn
from redline import Workload

class Network(nn.Linear):
    def forward(self, x):
        return self.where_it_fails(x)

    def where_it_fails(self, x):
        raise ArithmeticError("no such sum")

def broken():
    raise KeyError("broken on purpose")

def mine():
    return Workload(lambda: Network(2, 2), lambda seed: torch.randn(3, 2))
"""


@pytest.mark.parametrize("arguments", [["--traceback", "climb"], ["climb", "--traceback"], ["profile", "--traceback"]])
@pytest.mark.parametrize("function, place", [("broken", "in broken"), ("mine", "in where_it_fails")])
def test_traceback_shows_the_users_line(
    command: Callable[..., Seen], tmp_path: Path, arguments: list[str], function: str, place: str
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    seen = command(*arguments, f"{tmp_path}/mine.py:{function}", "--device", "cpu")
    assert seen.code == 2 and seen.out == ""
    assert place in seen.err and "mine.py" in seen.err
    assert seen.err.splitlines()[-1].startswith("redline: ")


def test_without_it_there_is_one_sentence(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    seen = command("climb", f"{tmp_path}/mine.py:mine", "--device", "cpu")
    assert seen.code == 2 and "Traceback" not in seen.err and "no such sum" in seen.err
