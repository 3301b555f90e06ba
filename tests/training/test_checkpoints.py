"""A checkpoint brings everything back, belongs to one training, and is never half written."""

from pathlib import Path

import pytest
import torch
from torch import nn

from redline.errors import RedlineError
from redline.training import checkpoints
from redline.training.checkpoints import Position, State
from redline.training.ema import Ema


def state(identity: dict[str, object] | None = None) -> State:
    model = nn.Linear(5, 3)
    return State(
        model, Ema(model, 0.9), torch.optim.AdamW(model.parameters(), 1e-2), identity or {"width": 5, "sizes": (1, 2)}
    )


def learn(some: State) -> None:
    some.model(torch.randn(7, 5)).square().sum().backward()
    some.optimizer.step()
    some.optimizer.zero_grad()
    some.ema.update(some.model, 1)


def test_everything_comes_back(tmp_path: Path) -> None:
    first, path = state(), tmp_path / "deep" / "checkpoint.pt"
    learn(first)
    first.save(path, Position(11, 2.5))
    after = torch.rand(4)
    torch.manual_seed(99)
    second = state()
    assert second.load(path) == Position(11, 2.5)
    assert torch.equal(torch.rand(4), after)
    for one, other in ((first.model, second.model), (first.ema.model, second.ema.model)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    torch.manual_seed(5)
    learn(first)
    torch.manual_seed(5)
    learn(second)
    assert torch.equal(first.model.weight, second.model.weight)
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]


def test_another_training_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state().save(path, Position())
    with pytest.raises(RedlineError, match="its width is 5, not 6"):
        state({"width": 6, "sizes": (1, 2)}).load(path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(RedlineError, match="not a readable checkpoint"):
        state().load(path)
    with pytest.raises(RedlineError, match="no checkpoint"):
        state().load(tmp_path / "none.pt")
    torch.save({"something": 1}, path)
    with pytest.raises(RedlineError, match="not a checkpoint of this version"):
        state().load(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "checkpoint.pt"
    state().save(path, Position(3, 1.0))

    def break_off(_content: object, file: object) -> None:
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(checkpoints.torch, "save", break_off)
    with pytest.raises(RedlineError if isinstance(error, OSError) else KeyboardInterrupt):
        state().save(path, Position(4, 2.0))
    assert state().load(path).step == 3 and [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
