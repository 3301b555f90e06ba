"""A checkpoint brings everything back, belongs to one training, is checked when read, and is never half written."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from redline.errors import RedlineError
from redline.training import checkpoints
from redline.training.arithmetic import Arithmetic
from redline.training.checkpoints import Checkpoints, Position, State, read_checkpoint
from redline.training.ema import Ema


class Counting(Arithmetic):
    """Has a state of its own."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def state(identity: dict[str, object] | None = None, width: int = 5) -> State:
    model = nn.Linear(width, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return State(model, Ema(model, 0.9), optimizer, Counting(), identity or {"width": 5, "sizes": (1, 2)})


def learn(some: State) -> None:
    some.model(torch.randn(7, 5)).square().sum().backward()
    some.optimizer.step()
    some.optimizer.zero_grad()
    some.ema.update(1)


def test_a_checkpoint_restores_everything(tmp_path: Path) -> None:
    first, kept = state(), Checkpoints(tmp_path / "deep" / "er")
    learn(first)
    first.arithmetic.value = 7
    kept.save(first, Position(11, 2.5, 3))
    after = torch.rand(4)
    torch.manual_seed(99)
    second = state()
    assert kept.load(second) == Position(11, 2.5, 3) and second.arithmetic.value == 7
    assert torch.equal(torch.rand(4), after)
    for one, other in ((first.model, second.model), (first.ema.model, second.ema.model)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    torch.manual_seed(5)
    learn(first)
    torch.manual_seed(5)
    learn(second)
    assert torch.equal(first.model.weight, second.model.weight)
    assert [file.name for file in kept.folder.iterdir()] == ["step-000000011.pt"]


def test_who_steps_the_moments_is_chosen_anew(tmp_path: Path) -> None:
    first, second = state(), state()
    first.optimizer.param_groups[0]["fused"] = True
    learn(first)
    Checkpoints(tmp_path).save(first, Position(1))
    Checkpoints(tmp_path).load(second)
    assert second.optimizer.param_groups[0]["fused"] is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=3)
    (tmp_path / ".step-killed").write_bytes(b"half of it")
    for step in (2, 9, 10, 100, 1000):
        kept.save(state(), Position(step))
    assert [file.name for file in sorted(tmp_path.iterdir())] == [f"step-{n:09}.pt" for n in (10, 100, 1000)]
    assert kept.load(state()).step == 1000


def test_a_checkpoint_of_another_training_raises(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(state(), Position())
    with pytest.raises(RedlineError, match="its width is 5, not 6"):
        kept.load(state({"width": 6, "sizes": (1, 2)}))
    with pytest.raises(RedlineError, match="belongs to another model or optimizer"):
        kept.load(state(width=6))


def test_every_kind_of_damage_is_seen(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    path = kept.save(state(), Position(4))
    whole = path.read_bytes()
    for cut in (b"", whole[:5], whole[:30]):
        path.write_bytes(cut)
        with pytest.raises(RedlineError, match="is damaged: it is cut off"):
            read_checkpoint(path)
    for spoilt in (whole[:-1], whole[:1000], whole + b"x", b"PK" + whole):
        path.write_bytes(spoilt)
        with pytest.raises(RedlineError, match="not a checkpoint of this version|damaged"):
            read_checkpoint(path)
    for place in (0, 9, 41, 600, len(whole) // 2, len(whole) - 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(RedlineError, match="not a checkpoint of this version|damaged"):
            kept.load(state())
    with pytest.raises(RedlineError, match="no checkpoint in"):
        Checkpoints(tmp_path / "none").load(state())
    kept.save(state(), Position(5)).write_bytes(b"")
    with pytest.raises(RedlineError, match="all 2 checkpoints are damaged; the oldest: the checkpoint '.*04.pt' is"):
        kept.saved_training()


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(state(), Position(4))
    newest = kept.save(state(), Position(5))
    newest.write_bytes(newest.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="step-000000005.* is damaged.* Using the one before it"):
        assert kept.load(state()).step == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(state(), Position(3, 1.0))

    def break_off(_content: object, file: object) -> None:
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(checkpoints.torch, "save", break_off)
    with pytest.raises(RedlineError if isinstance(error, OSError) else KeyboardInterrupt) as said:
        kept.save(state(), Position(4, 2.0))
    if isinstance(error, OSError):
        assert "No space left on device; 'step-000000003.pt' is untouched." in str(said.value)
    assert kept.load(state()).step == 3 and [file.name for file in tmp_path.iterdir()] == ["step-000000003.pt"]


def test_temporary_files_of_a_killed_process_are_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, write = Checkpoints(tmp_path), checkpoints._write
    (tmp_path / ".step-abcd").write_bytes(b"half of one")

    def checked(file: object, content: object) -> None:
        assert not (tmp_path / ".step-abcd").exists()
        write(file, content)

    monkeypatch.setattr(checkpoints, "_write", checked)
    kept.save(state(), Position(3))
    assert [file.name for file in tmp_path.iterdir()] == ["step-000000003.pt"]


def test_a_full_disk_raises_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """A real limit of the system in the middle of torch's own writing, wherever in it that falls."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path)
    model = nn.Linear(300, 300)
    state = State(model, None, torch.optim.AdamW(model.parameters()), Arithmetic(), {})
    whole = checkpoints.save(state, Position(1)).read_bytes()
    for limit in (100, 20_000, len(whole) - 70_000, len(whole) - 500, len(whole) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(RedlineError, match=r"pt': File too large; 'step-000000001.pt' is untouched\.$"):
                checkpoints.save(state, Position(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [whole], limit
    assert checkpoints.load(state).step == 1
